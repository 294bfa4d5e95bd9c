// Decides which saved tensors may be offloaded, from the tensor alone.
//
// Parameters are recognised by storage, because autograd saves Linear's weight as a view of it.
//
// Thread safety: ParameterStorages is immutable after construction.

#ifndef PINION_HOOKS_PLAN_OFFLOAD_POLICY_H_
#define PINION_HOOKS_PLAN_OFFLOAD_POLICY_H_

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>

#include "absl/container/flat_hash_map.h"
#include "pinion/hooks/autograd/torch_bridge.h"

namespace pinion {

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

// The storages of a module's parameters and buffers. Weak references keep their addresses from
// being reused.
class ParameterStorages {
 public:
  void Add(const at::Tensor& tensor);
  bool Contains(const at::Tensor& tensor) const;

 private:
  absl::flat_hash_map<const c10::StorageImpl*, WeakStorage> storages_;
};

enum class TensorKind {
  kActivation,   // may be offloaded
  kHeldLeaf,     // an input or a dropout mask: only if nothing else references its storage
  kParameter,    // stays on the device
  kSmall,        // stays on the device
  kUnsupported,  // stays on the device: another device type, not plain, conjugated, ...
};

// Saved tensors of at least this size are worth offloading (TRL's default).
inline constexpr uint64_t kMinOffloadBytes = 1024;

// Returns whether the tensor is plain (IsPlainTensor) and its storage holds its values, which a
// conjugate view's does not.
bool IsPlainStrided(const at::TensorBase& tensor);

// Returns the base of a view, or the tensor itself.
const at::TensorBase& BaseOf(const at::TensorBase& tensor);

// Without `parameters` all leaves that require a gradient, and their views, count as parameters.
TensorKind ClassifyTensor(const at::Tensor& tensor, c10::DeviceType device_type,
                          uint64_t min_offload_bytes, const ParameterStorages* parameters);

// Returns which bytes of a storage to save for a tensor that can touch `extent`. If that is half of
// the storage or more, the whole storage, so that other views share the copy. Else the extent, so
// that a small view of a flat buffer does not move the buffer. The result begins at a multiple of
// every item size, so that views of other types can share it.
StorageExtent ExtentToSave(StorageExtent extent, uint64_t storage_bytes);

}  // namespace pinion

#endif  // PINION_HOOKS_PLAN_OFFLOAD_POLICY_H_
