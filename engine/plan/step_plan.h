// Which objects of a step leave the device, when their memory is let go of, and when they come
// back: a plan that keeps the step within a given device memory, at the least cost that is found.
//
//   PINION_ASSIGN_OR_RETURN(StepPlan plan, PlanStep(step, memory_bytes, link));
//   for (const StepMove& move : plan.moves) ...      // all others stay, and are never copied
//   plan.step_us, plan.peak_bytes                    // what it comes to
//
// Whom: where a stretch needs more than there is, the idle object whose next use is farthest away
// goes (Belady's rule), except where another choice that was tried makes the step shorter. What
// frees nothing stays. When: the copy out begins once the operator that made the object has
// returned, or behind those whose memory has to go sooner (copy_order.h); its device memory is let
// go of at the last use before the room is needed; it is fetched as soon as there is room until it
// is read, in the order of reading. A small object leaves, too, where a much larger one can come
// back earlier for it. All of that is by ordinal, so the peak does not depend on how fast the link
// is, only the time does (step_simulation.h).
//
// Thread safety: pure functions.

#ifndef PINION_ENGINE_PLAN_STEP_PLAN_H_
#define PINION_ENGINE_PLAN_STEP_PLAN_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "pinion/engine/plan/link_calibration.h"
#include "pinion/engine/plan/step_record.h"

namespace pinion {

// An object is away from behind use `drop_at` until use `fetch_at`, which comes later.
struct StepMove {
  static constexpr uint32_t kNever = UINT32_MAX;
  static constexpr uint32_t kAtOnce = 0;

  uint32_t object = 0;
  uint32_t drop_at = 0;   // the compute waits for the copy out here, and the memory goes
  uint32_t fetch_at = 0;  // memory is allocated and the copy in submitted here; kNever: not at all
  uint32_t read_at = 0;   // the compute waits for the copy in here, or computes the object again
  // The copy out is submitted at this use, behind all that can be by then, and by drop_at. kAtOnce:
  // once the operator that saves the object has returned.
  uint32_t copy_at = kAtOnce;
  bool copies_out = true;  // false: the host has the bytes already, or nobody needs to

  friend bool operator==(const StepMove&, const StepMove&) = default;
};

struct StepPlan {
  // In the order of copies in; then those that never come back, and those that nobody copies.
  std::vector<StepMove> moves;
  uint64_t peak_bytes = 0;  // of the device, in any stretch
  double step_us = 0;       // as SimulateStep has it
};

// The least memory within which the step can be planned: what its hungriest stretch uses.
// InvalidArgument for a record that is not valid.
absl::StatusOr<uint64_t> LeastMemoryBytes(const StepRecord& step);

enum class PlanEffort {
  kRule,   // one plan, by Belady's rule, its copies in order
  kTries,  // and others, as many as can be tried in 10 to 20 ms
};

// Within `memory_bytes`, the other bytes of the step included. ResourceExhausted, with the least
// that can be, where that is not enough. InvalidArgument for a record that is not valid or whose
// objects come from the host, and for a link that was not measured.
absl::StatusOr<StepPlan> PlanStep(const StepRecord& step, uint64_t memory_bytes,
                                  const LinkCalibration& link,
                                  PlanEffort effort = PlanEffort::kTries);

// As little moved as is needed for a step of at most `slowdown` times its compute alone, in the
// least memory; 1.01 is "no slower than 1 %".
absl::StatusOr<StepPlan> PlanStepWithin(const StepRecord& step, double slowdown,
                                        const LinkCalibration& link);

}  // namespace pinion

#endif  // PINION_ENGINE_PLAN_STEP_PLAN_H_
