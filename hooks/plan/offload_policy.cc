#include "pinion/hooks/plan/offload_policy.h"

#include <c10/core/DispatchKeySet.h>

#include "pinion/engine/link/packing.h"

namespace pinion {
namespace {

// Plain tensors whose storage does not hold their values: conjugate and negative views, zeros
// without memory, and streamed weights (hooks/weights/streamed_tensor.h), which are on the host.
constexpr c10::DispatchKeySet kNotTheData({
    c10::DispatchKey::DeferredInit,
    c10::DispatchKey::Conjugate,
    c10::DispatchKey::Negative,
    c10::DispatchKey::ZeroTensor,
});

}  // namespace

bool IsPlainStrided(const at::TensorBase& tensor) {
  return IsPlainTensor(tensor) && !tensor.key_set().has_any(kNotTheData) &&
         tensor.storage().data_ptr().get() != nullptr;
}

const at::TensorBase& BaseOf(const at::TensorBase& tensor) {
  return tensor.is_view() ? tensor._base() : tensor;
}

void ParameterStorages::Add(const at::Tensor& tensor) {
  if (!IsPlainTensor(tensor)) return;
  const c10::Storage& storage = tensor.storage();
  storages_.try_emplace(storage.unsafeGetStorageImpl(), storage.getWeakStorageImpl());
}

bool ParameterStorages::Contains(const at::Tensor& tensor) const {
  return storages_.contains(tensor.storage().unsafeGetStorageImpl());
}

TensorKind ClassifyTensor(const at::Tensor& tensor, c10::DeviceType device_type,
                          uint64_t min_offload_bytes, const ParameterStorages* parameters) {
  if (tensor.device().type() != device_type || !IsPlainStrided(tensor)) {
    return TensorKind::kUnsupported;
  }
  const at::TensorBase& base = BaseOf(tensor);
  if (parameters != nullptr) {
    if (parameters->Contains(tensor)) return TensorKind::kParameter;
  } else if (base.is_leaf() && base.requires_grad()) {
    return TensorKind::kParameter;
  }
  const StorageExtent extent = ExtentOf(tensor);
  // The storage was shrunk under the tensor; bytes after its end belong to others.
  if (extent.end_bytes > tensor.storage().nbytes()) return TensorKind::kUnsupported;
  const uint64_t size_bytes = extent.size_bytes();
  if (size_bytes == 0 || size_bytes < min_offload_bytes) return TensorKind::kSmall;
  return base.is_leaf() ? TensorKind::kHeldLeaf : TensorKind::kActivation;
}

StorageExtent ExtentToSave(StorageExtent extent, uint64_t storage_bytes) {
  if (2 * extent.size_bytes() >= storage_bytes) return {0, storage_bytes};
  extent.begin_bytes &= ~(kPackAlignmentBytes - 1);
  return extent;
}

}  // namespace pinion
