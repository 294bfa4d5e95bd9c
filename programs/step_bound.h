// The least time that a training step can take within a given device memory: a lower bound for
// every offload policy that moves whole objects and copies none before its operator has returned.
//
//   PINION_ASSIGN_OR_RETURN(double bound_us, StepLowerBoundUs(step, memory_bytes, link));
//   double efficiency = bound_us / measured_step_us;          // 1 is perfect
//
// "The link can hide the transfer" means that the bound is at most 1.01 x the compute alone
// (docs/performance.md). The bound is the greatest of two (where it comes from:
// docs/decisions/0021-a-bound-for-every-order-of-uses.md and 0040-a-bound-for-whole-objects.md):
//
//   compute + max over p of (waits for copies out before interval p + waits for copies in behind
//   it) what the link takes for the bytes that have to move at least
//
// Waits for copies out, forward in time: an object is on the device as a whole or not at all, and
// what cannot be beside an interval has been copied before it begins. So for each interval p, and
// each interval b before it, over the idle objects whose copies cannot begin before b has ended:
//
//   begin(p) >= end(b) + (their bytes - the most of them that fit into p's room) / bandwidth
//
// p's room is what other live bytes and the objects that its operators use leave. A copy begins
// when the operator that saves the object has returned
// (0014-no-copy-before-the-operator-returns.md), at the link's bandwidth and with no fixed cost.
// Waits for copies in are the same, reversed in time: an object is back before its next use. Each
// of the two lets the other direction's copies cost nothing, so both hold for any policy, and so
// does their sum over parts of the step that do not overlap. Where all bytes that move in one
// direction move before those of the other, as in one forward and its backward, p is the turn.
// Where sizes are so many that more than 64 different sums fit, objects count as if they could be
// cut, which errs towards less waiting.
//
// What the link takes: both directions at once go at the duplex rates, until one has no more to
// carry. Steps whose forwards and backwards interleave are bound by this.
//
// An object counts as used throughout the interval that makes it, until its operator has returned,
// and throughout the interval behind each later use, and as long as the program holds it. One that
// is never read may leave and never comes back; it counts until the program lets go of it
// (StepObject::needed_until). One that can be computed again counts only there, and computing it
// takes no time.
//
// Quadratic in the number of uses at worst: for 5,000 a tenth of a second as a rule, and some
// seconds where the link is far too slow and the room holds some sixty of thousands of equal
// objects.
//
// Thread safety: a pure function.

#ifndef PINION_PROGRAMS_STEP_BOUND_H_
#define PINION_PROGRAMS_STEP_BOUND_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/planner/step_trace.h"

namespace pinion {

// `memory_bytes` is all that the step may have on the device, its other bytes included. Infinite
// where an interval alone needs more. InvalidArgument for a record that is not valid, and for a
// link whose bandwidths were not measured; it says which.
absl::StatusOr<double> StepLowerBoundUs(const StepTrace& step, uint64_t memory_bytes,
                                        const LinkCalibration& link);

}  // namespace pinion

#endif  // PINION_PROGRAMS_STEP_BOUND_H_
