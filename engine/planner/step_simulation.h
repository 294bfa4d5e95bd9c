// Simulates a planned step: a model of the compute and of both directions of the link.
//
//   PINION_ASSIGN_OR_RETURN(StepTimes times, SimulateStep(step, plan.moves, link));
//   times.step_us, times.stalls_us[i]          // how long interval i waited before it began
//
// Copies of one direction run one after the other, in the order of submission. Copies out are
// submitted in the order in which the objects are made, or at StepMove::copy_at. Copies in are
// submitted in the order of `moves`. A copy takes its fixed cost and then its bytes at the link's
// bandwidth, at the duplex rate while the other direction transfers as well. The compute waits only
// where a move says so. A recast takes compute time at its read.
//
// Thread safety: a pure function.

#ifndef PINION_ENGINE_PLANNER_STEP_SIMULATION_H_
#define PINION_ENGINE_PLANNER_STEP_SIMULATION_H_

#include <cstddef>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_trace.h"

namespace pinion {

struct StepTimes {
  double step_us = 0;
  std::vector<double> begins_us;  // of each interval's compute
  std::vector<double> stalls_us;  // how long the compute waited before that
  // By move: when its copies began and ended; 0 without a copy. A recast counts as the copy in.
  std::vector<double> out_begins_us;
  std::vector<double> out_us;
  std::vector<double> in_begins_us;
  std::vector<double> in_us;
};

// Simulates one step with different moves, which are possible in it.
class StepSimulator {
 public:
  // InvalidArgument for a link without measurements. `step` is valid and has to outlive the
  // simulator.
  static absl::StatusOr<StepSimulator> Create(const StepTrace& step, const LinkCalibration& link);

  StepTimes Run(absl::Span<const StepMove> moves) const;

 private:
  StepSimulator(const StepTrace& step, const LinkCalibration& link, const LinkRates& rates);

  const StepTrace* step_;
  LinkCalibration link_;
  LinkRates rates_;
  std::vector<size_t> leaves_from_;  // by object: the first access at which its copy out may begin
};

// InvalidArgument for an invalid trace, or a move that is impossible in the step.
absl::Status CheckMoves(const StepTrace& step, absl::Span<const StepMove> moves);

// Returns the errors of CheckMoves, and InvalidArgument for a link without measurements.
absl::StatusOr<StepTimes> SimulateStep(const StepTrace& step, absl::Span<const StepMove> moves,
                                       const LinkCalibration& link);

}  // namespace pinion

#endif  // PINION_ENGINE_PLANNER_STEP_SIMULATION_H_
