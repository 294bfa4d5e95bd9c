// Saved tensors that a node of backward has been given, while somebody else has a use for their
// bytes.
//
// Autograd's engine takes a gradient that nobody else refers to for its own: it adds to it in place
// and makes it a leaf's .grad. It counts the references to the tensor, not those to the storage.
// Without hooks a saved input is the user's own tensor, so a node that returns what it has saved as
// its gradient is safe: the engine copies it. What an unpack hook returns is another tensor over
// the same storage, and would become a .grad that overwrites the user's tensor, a parameter, or
// what other nodes have saved. A reference of ours stands in for the user's.
//
// A tensor that was lent comes back when nobody else refers to it, which is looked at with each new
// loan, or when its backward ends.
//
// Thread safety: thread-safe.

#ifndef PINION_HOOKS_AUTOGRAD_LENT_TENSORS_H_
#define PINION_HOOKS_AUTOGRAD_LENT_TENSORS_H_

#include <ATen/core/Tensor.h>

namespace pinion {

// Whether autograd gives a node a copy of what an unpack hook returns for `saved`: the node gets
// the very tensor only where the saved one has no history and needs no gradient.
bool NodeGetsCopyOf(const at::Tensor& saved);

// What an unpack hook returns in the place of `tensor`: the engine copies whatever the node makes
// of it before it writes. That is the tensor itself, unless the `node_gets_copy`, which then is
// lent as well. Outside of a backward, the tensor itself.
at::Tensor Lend(const at::Tensor& tensor, bool node_gets_copy);

// Lets go of the tensors that have come back.
void SettleLoans();

}  // namespace pinion

#endif  // PINION_HOOKS_AUTOGRAD_LENT_TENSORS_H_
