// Identifies a saved tensor across steps that repeat the same work.
//
// Thread safety: pure functions.

#ifndef PINION_HOOKS_PLAN_SAVED_SIGNATURE_H_
#define PINION_HOOKS_PLAN_SAVED_SIGNATURE_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "pinion/hooks/autograd/saved_tensor_hooks.h"

namespace pinion {

// Returns a number for a place in the graph. Repeated steps get the same numbers if `begin` is
// CurrentNode() at the step's or a scope's beginning. Returns 0 or 1 for other threads, which count
// their own nodes.
uint64_t PlaceNumber(const NodeId& begin, const GraphPlace& place);

// Returns StepObject::signature for a tensor at PlaceNumber `place` with `size_bytes` to save.
uint64_t SignatureOf(const at::Tensor& tensor, uint64_t place, uint64_t size_bytes);

}  // namespace pinion

#endif  // PINION_HOOKS_PLAN_SAVED_SIGNATURE_H_
