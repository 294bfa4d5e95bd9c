// Recognises saved tensors that are casts of a parameter, as autocast makes them of weights, and
// recasts them.
//
// Thread safety: immutable.

#ifndef PINION_HOOKS_PLAN_PARAMETER_CAST_H_
#define PINION_HOOKS_PLAN_PARAMETER_CAST_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/plan/offload_policy.h"

namespace pinion {

// The number of in-place writes to a storage that raise no version: those of LibTorch's fused
// optimizers (_fused_adamw_ and others). They are counted while a FusedWrites of the storage
// exists, by kernels at the key ADInplaceOrView, where other operators raise versions. The caller
// must keep a weak reference to the storage, which is identified by its address. Thread-safe.
using FusedWrites = std::shared_ptr<const std::atomic<uint64_t>>;
FusedWrites WatchFusedWrites(const c10::Storage& storage);

// Identifies a parameter's bytes: its memory, its version, and the number of recorded writes that
// raise no version.
class ParameterState {
 public:
  // Takes the parameter's present state.
  explicit ParameterState(const at::Tensor& parameter);

  // Returns false if the parameter was changed in place or got other memory.
  bool IsOf(const at::Tensor& parameter) const;

 private:
  WeakStorage storage_;
  FusedWrites fused_writes_;
  const void* data_;
  int64_t version_;
  uint64_t writes_;
};

class ParameterCast {
 public:
  // Returns the cast that the tensor is, or is a view of. Returns null if it is no cast, or a
  // recast could not produce all of its storage. Costs one comparison unless the tensor has 16-bit
  // floating-point values.
  static std::unique_ptr<const ParameterCast> Of(const at::Tensor& tensor);

  const at::Tensor& parameter() const { return parameter_; }
  // Returns the cast's node if the thread that called Of() made it, else nothing.
  const std::optional<NodeId>& node() const { return node_; }

  // Returns whether the parameter is unchanged since Of().
  bool IsUnchanged() const;

  // Recasts on the current stream of the parameter's device, into new memory of the same layout.
  // Does not check whether the parameter is unchanged.
  c10::Storage Again() const;

  // Returns "Float [32, 16]", the parameter, for messages.
  std::string Describe() const;

 private:
  ParameterCast(const at::TensorBase& cast, const at::Tensor& parameter,
                const std::optional<NodeId>& node);

  const at::Tensor parameter_;
  const ParameterState state_;
  const c10::SmallVector<int64_t, 4> sizes_;
  const c10::SmallVector<int64_t, 4> strides_;
  const c10::ScalarType type_;
  const std::optional<NodeId> node_;
};

}  // namespace pinion

#endif  // PINION_HOOKS_PLAN_PARAMETER_CAST_H_
