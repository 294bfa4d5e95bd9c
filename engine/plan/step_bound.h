// The least time that a training step can take within a given device memory: a lower bound that no
// offload policy can bend.
//
//   StepTrace trace = ...;                      // of a step *without* offload
//   double bound_ms = StepLowerBoundMs(trace, peak_bytes, {out_bytes_per_ms, in_bytes_per_ms});
//   double efficiency = bound_ms / measured_step_ms;          // 1 is perfect
//
// LB(M) = F(M) + B(M). Forward: each saved tensor leaves the device from its birth, first in first
// out, as a fluid at the link's bandwidth and with no fixed cost; an operator starts only when what
// is live and not yet gone, with what it saves itself, fits in M. Backward is the same recursion
// reversed in time, with the other direction's bandwidth: a tensor must be back before its last
// use. "The link can hide the transfer" means LB(M) <= 1.01 x the compute alone (docs/design.md).
//
// Thread safety: pure functions.

#ifndef PINION_ENGINE_PLAN_STEP_BOUND_H_
#define PINION_ENGINE_PLAN_STEP_BOUND_H_

#include <cstdint>
#include <vector>

namespace pinion {

// A stretch of compute, and what it saves at its end (forward) or reads last at its start
// (backward).
struct TraceOperator {
  double compute_ms = 0;
  uint64_t saved_bytes = 0;
};

struct StepTrace {
  std::vector<TraceOperator> forward;   // in the order of execution
  std::vector<TraceOperator> backward;  // in the order of execution

  double compute_ms() const;
};

struct LinkRate {
  double out_bytes_per_ms = 0;
  double in_bytes_per_ms = 0;
};

// `memory_bytes` is what saved tensors may occupy. Infinite when a single operator saves more.
double StepLowerBoundMs(const StepTrace& trace, uint64_t memory_bytes, const LinkRate& rate);

}  // namespace pinion

#endif  // PINION_ENGINE_PLAN_STEP_BOUND_H_
