// Saved tensors that are nothing but a parameter in another type, as autocast makes them of
// weights: their bytes can be had once more by another cast.
//
// Thread safety: immutable.

#ifndef PINION_HOOKS_PLAN_PARAMETER_CAST_H_
#define PINION_HOOKS_PLAN_PARAMETER_CAST_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/plan/fused_writes.h"
#include "pinion/hooks/plan/offload_policy.h"

namespace pinion {

// Which bytes a parameter has, as far as anybody can tell: its memory, the version of it, and what
// is known of writes that raise none.
class ParameterState {
 public:
  // As it is now.
  explicit ParameterState(const at::Tensor& parameter);

  // False once it was changed in place, or given other memory.
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
  // What the tensor, or the tensor that it is a view of, is a cast of; null if that is anything
  // else, or if another cast could not make all of its storage. What is no 16-bit tensor costs a
  // comparison.
  static std::unique_ptr<const ParameterCast> Of(const at::Tensor& tensor);

  const at::Tensor& parameter() const { return parameter_; }
  // The cast's place among the nodes of the calling thread at Of(); nothing if another thread made
  // it.
  const std::optional<NodeId>& node() const { return node_; }

  // Whether the parameter is what it was at Of().
  bool IsUnchanged() const;

  // Casts once more, on the current stream of the parameter's device, into memory of the same
  // layout. Does not look whether the parameter is unchanged.
  c10::Storage Again() const;

  // For messages: "Float [32, 16]", the parameter.
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
