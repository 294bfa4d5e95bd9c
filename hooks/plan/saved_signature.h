// By what a saved tensor is known again in a later step that does the same.
//
// Thread safety: pure functions.

#ifndef PINION_HOOKS_PLAN_SAVED_SIGNATURE_H_
#define PINION_HOOKS_PLAN_SAVED_SIGNATURE_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "pinion/hooks/autograd/saved_tensor_hooks.h"

namespace pinion {

// A number of a place in the graph, the same in each step that does the same where `begin` is
// CurrentNode() at the step's or a scope's beginning. Other threads number their nodes by
// themselves, and what they save has the number 0.
uint64_t PlaceNumber(const NodeId& begin, const GraphPlace& place);

// StepObject::signature of a saved tensor, of which so many bytes are saved at that PlaceNumber.
uint64_t SignatureOf(const at::Tensor& tensor, uint64_t place, uint64_t size_bytes);

}  // namespace pinion

#endif  // PINION_HOOKS_PLAN_SAVED_SIGNATURE_H_
