// Lower bound for the time of a training step within a given device memory.
//
//   PINION_ASSIGN_OR_RETURN(double bound_us, StepLowerBoundUs(step, memory_bytes, link));
//   double efficiency = bound_us / measured_step_us;          // 1 is perfect
//
// The bound holds for every offload policy that moves whole objects and begins no copy before its
// operator has returned. The link can hide the transfer if the bound is at most 1.01 x the compute
// alone (docs/results/results.md). The bound is the greater of two, which
// docs/maintainers/decisions/0021 derives.
//
//   1. compute + max over p of (waits for copies out before interval p + waits for copies in after)
//   2. the time of the link for the least bytes that have to move
//
// Waits for copies out. An object is on the device as a whole or not at all. Objects that do not
// fit during an interval were copied before it begins. So this holds for each interval p, each
// earlier interval b, and the idle objects whose copies cannot begin before b has ended:
//
//   begin(p) >= end(b) + (their bytes - the most of them that fit beside p) / bandwidth
//
// Other live bytes and the objects that p accesses limit what fits. A copy begins when the operator
// that saves the object has returned (docs/maintainers/decisions/0014). It takes no
// fixed cost. If more than 64 different sums of sizes fit, objects count as divisible, which errs
// towards less waiting.
//
// Waits for copies in are the same, reversed in time: an object is fetched before its next access.
// Each of the two ignores the other direction's copies. So both hold for any policy, and so does
// their sum over parts of the step that do not overlap. In one forward and its backward, p is the
// turn.
//
// The time of the link: both directions run at the duplex rates until one has no more bytes. This
// bounds steps whose forwards and backwards interleave.
//
// An object counts as in use in the interval that makes it, until its operator has returned, in the
// interval after each later access, and as long as the program references it. An object that is
// never read counts until StepObject::needed_until. A recast object counts only while it is in use,
// and recasting takes no time.
//
// Takes a tenth of a second for 5,000 accesses, at worst some seconds: quadratic time.
//
// Thread safety: a pure function.

#ifndef PINION_PROGRAMS_STEP_BOUND_H_
#define PINION_PROGRAMS_STEP_BOUND_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/planner/step_trace.h"

namespace pinion {

// `memory_bytes` include the step's other bytes. Infinity if one interval alone needs more.
// InvalidArgument for an invalid trace, and names bandwidths of the link that were not measured.
absl::StatusOr<double> StepLowerBoundUs(const StepTrace& step, uint64_t memory_bytes,
                                        const LinkCalibration& link);

}  // namespace pinion

#endif  // PINION_PROGRAMS_STEP_BOUND_H_
