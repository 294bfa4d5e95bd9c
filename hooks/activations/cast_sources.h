// The parameters that a session has seen cast, and in which of its scopes a cast is known to be
// what another cast would make.
//
// Nobody notes a parameter's version when it is cast; it can be changed between its cast and the
// first save of it. So versions are noted when a scope begins: a cast that was made in the scope is
// of a parameter that has not changed since if its version is still the one that was noted.
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

// While one exists its address is not recycled.
using WeakTensorImpl = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// What the parameters were when a scope began.
class CastNotes {
 public:
  void Add(const at::Tensor& parameter);
  bool Contains(const at::Tensor& parameter) const;
  // Whether it is what it was.
  bool IsUnchanged(const at::Tensor& parameter) const;

 private:
  absl::flat_hash_map<const c10::TensorImpl*, std::pair<WeakTensorImpl, ParameterState>> notes_;
};

class CastSources {
 public:
  // Of those that are known, for a scope that begins now. Forgets those that have died.
  CastNotes Note();

  // The cast that `tensor` is, or is a view of, if another one makes the same bytes; null: it is
  // none, or nobody can tell. `notes` are from `begin`, the beginning of the scope that saves it.
  // What is not known is from the next scope on.
  std::unique_ptr<const ParameterCast> Find(const at::Tensor& tensor, const CastNotes& notes,
                                            const NodeId& begin);

 private:
  Mutex mu_;
  absl::flat_hash_map<const c10::TensorImpl*, WeakTensorImpl> known_ ABSL_GUARDED_BY(mu_);
};

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_CAST_SOURCES_H_
