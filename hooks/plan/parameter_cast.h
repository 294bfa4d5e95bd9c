// Recognises saved tensors that are casts of a parameter, as autocast makes them of weights, and
// recasts them.
//
// A cast is recast only if the parameter has not changed since. Autograd does not record the
// parameter's version at the cast, so a session records versions when a scope begins
// (CastSources). A cast that was made in the scope is safe if the version is still the recorded
// one.
//
// Thread safety: CastSources is thread-safe, everything else is immutable.

#ifndef PINION_HOOKS_PLAN_PARAMETER_CAST_H_
#define PINION_HOOKS_PLAN_PARAMETER_CAST_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/plan/offload_policy.h"

namespace pinion {

// The number of in-place writes to a storage that raise no version: those of LibTorch's fused
// optimizers (_fused_adamw_ and others). They are counted while a FusedWrites of the storage
// exists, by kernels at the key ADInplaceOrView, where other operators raise versions. The caller
// must keep a weak reference to the storage, which is identified by its address. Thread-safe.
using FusedWrites = std::shared_ptr<const std::atomic<uint64_t>>;

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

// Keeps the TensorImpl's address from being recycled.
using WeakTensorImpl = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// States of parameters at the beginning of a scope.
class CastNotes {
 public:
  void Add(const at::Tensor& parameter);
  // Returns the parameter's state; null if it was not known.
  const ParameterState* Find(const at::Tensor& parameter) const;

 private:
  absl::flat_hash_map<const c10::TensorImpl*, std::pair<WeakTensorImpl, ParameterState>> notes_;
};

class CastSources {
 public:
  // Records the states of known parameters for a scope that begins. Forgets destroyed ones.
  CastNotes Note();

  // Returns the cast that `tensor` is, or is a view of, if recasting gives the same bytes; else
  // null. `notes` were recorded at `begin`, when the saving scope began. A new parameter becomes
  // known from the next scope on.
  std::unique_ptr<const ParameterCast> Find(const at::Tensor& tensor, const CastNotes& notes,
                                            const NodeId& begin);

 private:
  Mutex mu_;
  absl::flat_hash_map<const c10::TensorImpl*, WeakTensorImpl> known_ ABSL_GUARDED_BY(mu_);
};

}  // namespace pinion

#endif  // PINION_HOOKS_PLAN_PARAMETER_CAST_H_
