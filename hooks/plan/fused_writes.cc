#include "pinion/hooks/plan/fused_writes.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/DispatchKeySet.h>
#include <torch/library.h>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/hooks/autograd/torch_bridge.h"

namespace pinion {
namespace {

class WatchedStorages {
 public:
  FusedWrites Watch(const c10::StorageImpl* storage) {
    MutexLock lock(mu_);
    std::weak_ptr<std::atomic<uint64_t>>& watched = watched_[storage];
    if (auto writes = watched.lock()) return writes;
    const std::shared_ptr<std::atomic<uint64_t>> writes(
        new std::atomic<uint64_t>(0), [this, storage](const std::atomic<uint64_t>* count) {
          Forget(storage);
          delete count;
        });
    watched = writes;
    return writes;
  }

  void Count(const at::Tensor& written) {
    if (!IsPlainTensor(written)) return;
    std::shared_ptr<std::atomic<uint64_t>> writes;  // may be the last owner: destroyed after mu_
    MutexLock lock(mu_);
    const auto found = watched_.find(written.storage().unsafeGetStorageImpl());
    if (found == watched_.end()) return;
    writes = found->second.lock();
    if (writes != nullptr) ++*writes;
  }

 private:
  // Does nothing if the storage has been watched anew.
  void Forget(const c10::StorageImpl* storage) {
    MutexLock lock(mu_);
    const auto found = watched_.find(storage);
    if (found != watched_.end() && found->second.expired()) watched_.erase(found);
  }

  Mutex mu_;
  absl::flat_hash_map<const c10::StorageImpl*, std::weak_ptr<std::atomic<uint64_t>>> watched_
      ABSL_GUARDED_BY(mu_);
};

WatchedStorages& TheWatched() {
  // Leaked: static destructors may destroy graphs.
  static WatchedStorages* const watched = new WatchedStorages;
  return *watched;
}

void CountWrites(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                 torch::jit::Stack* stack) {
  const c10::IValue& written = torch::jit::peek(*stack, 0, op.schema().arguments().size());
  for (const at::Tensor& tensor : written.toTensorVector()) TheWatched().Count(tensor);
  const at::AutoDispatchBelowADInplaceOrView below;
  op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
}

void RegisterKernels() {
  static torch::Library* const library = [] {
    auto* const made = new torch::Library(torch::Library::IMPL, "aten",
                                          c10::DispatchKey::ADInplaceOrView, __FILE__, __LINE__);
    for (const char* op :
         {"_fused_adam_", "_fused_adam_.tensor_lr", "_fused_adamw_", "_fused_adamw_.tensor_lr",
          "_fused_sgd_", "_fused_sgd_.tensor_lr", "_fused_adagrad_", "_fused_adagrad_.tensor_lr"}) {
      made->impl(op, torch::CppFunction::makeFromBoxedFunction<&CountWrites>());
    }
    return made;
  }();
  static_cast<void>(library);
}

}  // namespace

FusedWrites WatchFusedWrites(const c10::Storage& storage) {
  RegisterKernels();
  return TheWatched().Watch(storage.unsafeGetStorageImpl());
}

}  // namespace pinion
