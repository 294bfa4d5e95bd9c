// Protects saved tensors from autograd's in-place accumulation of gradients.
//
// Autograd adds in place to a gradient tensor that has one reference, or makes it a leaf's .grad.
// It counts references to the tensor, not to the storage. Without hooks a node that returns a saved
// input as its gradient is safe, since the user's own tensor is a second reference. An unpack hook
// returns another tensor over the same storage, which autograd would overwrite. An alias from
// Lend() keeps a second reference, so autograd copies instead.
//
// Pinion releases that reference when no other one is left, which each Lend() checks, or when the
// backward ends.
//
// Thread safety: thread-safe.

#ifndef PINION_HOOKS_AUTOGRAD_LENT_TENSORS_H_
#define PINION_HOOKS_AUTOGRAD_LENT_TENSORS_H_

#include <ATen/core/Tensor.h>

namespace pinion {

// Returns whether autograd gives a node a shallow copy of the tensor that an unpack hook returns
// for `saved`. It does if `saved` requires a gradient or has a forward-mode gradient.
bool NodeGetsCopyOf(const at::Tensor& saved);

// Returns an alias of `tensor` for an unpack hook to return; autograd copies the alias before it
// writes. With `node_gets_copy` the node's shallow copy is aliased as well. Returns `tensor` itself
// outside of a backward.
at::Tensor Lend(const at::Tensor& tensor, bool node_gets_copy);

// Releases the references to aliases that have no other reference.
void SettleLoans();

}  // namespace pinion

#endif  // PINION_HOOKS_AUTOGRAD_LENT_TENSORS_H_
