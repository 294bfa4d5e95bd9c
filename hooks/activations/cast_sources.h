// Finds saved tensors that are autocast's casts of parameters and can be recast later.
//
// A cast is recast only if the parameter has not changed since. Autograd does not record the
// parameter's version at the cast, so a session records versions when a scope begins. A cast that
// was made in the scope is safe if the version is still the recorded one.
//
// Thread safety: CastNotes is immutable, CastSources is thread-safe.

#ifndef PINION_HOOKS_ACTIVATIONS_CAST_SOURCES_H_
#define PINION_HOOKS_ACTIVATIONS_CAST_SOURCES_H_

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/plan/parameter_cast.h"

namespace pinion {

// Keeps the TensorImpl's address from being recycled.
using WeakTensorImpl = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// States of parameters at the beginning of a scope.
class CastNotes {
 public:
  void Add(const at::Tensor& parameter);
  bool Contains(const at::Tensor& parameter) const;
  // Returns whether the parameter's recorded state is its present one.
  bool IsUnchanged(const at::Tensor& parameter) const;

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

#endif  // PINION_HOOKS_ACTIVATIONS_CAST_SOURCES_H_
