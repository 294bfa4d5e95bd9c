#include "pinion/hooks/activations/scope_packer.h"

#include <chrono>
#include <utility>

#include "pinion/hooks/autograd/kept_tensor.h"

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
  if (saved == nullptr) return KeepTensor(tensor);
  return std::make_unique<TimedTensor>(std::move(saved), target_);
}

}  // namespace pinion
