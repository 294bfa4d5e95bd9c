// Which saved tensors leave the device: decisions about a tensor alone, without state.
//
// Parameters are recognised by storage, since autograd saves Linear's weight as a view of it.
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

// The storages of a module's parameters and buffers. Holds weak references: while one exists, its
// address cannot be recycled, so comparing addresses is comparing identities.
class ParameterStorages {
 public:
  void Add(const at::Tensor& tensor);
  bool Contains(const at::Tensor& tensor) const;

 private:
  absl::flat_hash_map<const c10::StorageImpl*, WeakStorage> storages_;
};

enum class TensorKind {
  kActivation,   // a candidate
  kHeldLeaf,     // a candidate only if nobody else holds its storage: an input, or a dropout mask
  kParameter,    // stays
  kSmall,        // stays
  kUnsupported,  // stays: another device type, not plain, conjugated, ...
};

// Saved tensors of at least so many bytes are worth moving (TRL's default and boundary).
inline constexpr uint64_t kMinOffloadBytes = 1024;

// A plain tensor (IsPlainTensor) whose storage is its data: no conjugate view, for example.
bool IsPlainStrided(const at::TensorBase& tensor);

// What the tensor is a view of, or the tensor itself.
const at::TensorBase& BaseOf(const at::TensorBase& tensor);

// Null `parameters`: no module is known, and leaves that require a gradient, and views of them, are
// parameters.
TensorKind ClassifyTensor(const at::Tensor& tensor, c10::DeviceType device_type,
                          uint64_t min_offload_bytes, const ParameterStorages* parameters);

// What moves of a storage with so many bytes of which a tensor can touch `extent`: all of it when
// the tensor covers half of it or more, so that its other views share one copy; else only what the
// tensor can touch (a small view of a flat buffer must not move it all). Either begins at a
// multiple of every item's size: views of other types can share it.
StorageExtent ExtentToSave(StorageExtent extent, uint64_t storage_bytes);

}  // namespace pinion

#endif  // PINION_HOOKS_PLAN_OFFLOAD_POLICY_H_
