#include "pinion/hooks/activations/scope_packer.h"

#include <c10/core/DispatchKey.h>
#include <c10/core/ScalarType.h>
#include <c10/util/StringUtil.h>

#include <chrono>
#include <string>
#include <utility>

#include "pinion/hooks/autograd/lent_tensors.h"
#include "pinion/hooks/autograd/saved_version.h"
#include "pinion/hooks/autograd/torch_bridge.h"

namespace pinion {
namespace {

// Adds the wall time of its own life to the statistics.
class HostTimer {
 public:
  explicit HostTimer(OffloadStatsRecorder& stats) : stats_(stats) {}
  ~HostTimer() {
    const std::chrono::duration<double, std::micro> elapsed =
        std::chrono::steady_clock::now() - start_;
    stats_.Update([&](OffloadStats& stats) { stats.pack_unpack_us += elapsed.count(); });
  }

 private:
  OffloadStatsRecorder& stats_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// "Float [16, 32]". A nested tensor has no sizes to tell.
std::string Describe(const at::Tensor& tensor) {
  if (tensor.is_nested()) return c10::str(tensor.scalar_type(), " nested tensor");
  return c10::str(tensor.scalar_type(), " ", tensor.sizes());
}

// What vmap wraps refuses to be detached without its interpreter: it is kept as it is.
at::Tensor WithoutHistory(const at::Tensor& tensor) {
  const bool batched = tensor.key_set().has(c10::DispatchKey::FuncTorchBatched);
  return batched ? tensor : DetachedAlias(tensor);
}

class KeptTensor : public SavedTensor {
 public:
  explicit KeptTensor(const at::Tensor& tensor)
      : tensor_(WithoutHistory(tensor)), version_(tensor) {}

  at::Tensor Unpack() override {
    version_.Check([this] { return Describe(tensor_); });
    return IsShared() || BackwardKeepsGraph() ? Lend(tensor_) : tensor_;
  }

 private:
  // Whether somebody else has its memory, or may come to have it again by a weak reference.
  bool IsShared() const {
    if (!tensor_.has_storage()) return true;
    const c10::weak_intrusive_ptr<c10::StorageImpl> weak = tensor_.storage().getWeakStorageImpl();
    // All owners together count as one weak reference, and this one is the second.
    return weak.use_count() > 1 || weak.weak_use_count() > 2;
  }

  const at::Tensor tensor_;
  const SavedVersion version_;
};

class TimedTensor : public SavedTensor {
 public:
  TimedTensor(std::unique_ptr<SavedTensor> saved, std::shared_ptr<PackTarget> target)
      : saved_(std::move(saved)), target_(std::move(target)) {}

  at::Tensor Unpack() override {
    const HostTimer timer(target_->stats());
    return saved_->Unpack();
  }

 private:
  const std::unique_ptr<SavedTensor> saved_;
  const std::shared_ptr<PackTarget> target_;
};

}  // namespace

ScopePacker::ScopePacker(std::shared_ptr<PackTarget> target, ParameterStorages parameters,
                         std::shared_ptr<PackScope> scope)
    : target_(std::move(target)), parameters_(std::move(parameters)), scope_(std::move(scope)) {}

std::unique_ptr<SavedTensor> ScopePacker::Pack(const at::Tensor& tensor) {
  const HostTimer timer(target_->stats());
  target_->stats().Update([](OffloadStats& stats) { ++stats.packed; });
  std::unique_ptr<SavedTensor> saved = target_->Pack(tensor, parameters_, *scope_);
  if (saved == nullptr) return std::make_unique<KeptTensor>(tensor);
  return std::make_unique<TimedTensor>(std::move(saved), target_);
}

}  // namespace pinion
