// How long a step takes whose objects are moved as planned: a model of the compute and of the two
// directions of the link.
//
//   PINION_ASSIGN_OR_RETURN(StepTimes times, SimulateStep(step, plan.moves, link));
//   times.step_us, times.stalls_us[i]          // what interval i waited before it began
//
// Copies of one direction go one after the other, in the order in which they are submitted: out in
// the order in which the objects are made, but for those that wait (StepMove::copy_at), in in the
// order of `moves`. Each takes its fixed cost and then its bytes at the link's bandwidth, at the
// duplex rate while the other direction carries something. The compute waits where a move says so,
// and for nothing else. What is computed again takes the compute's time at its read.
//
// Thread safety: a pure function.

#ifndef PINION_ENGINE_PLANNER_STEP_SIMULATION_H_
#define PINION_ENGINE_PLANNER_STEP_SIMULATION_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_trace.h"

namespace pinion {

struct StepTimes {
  double step_us = 0;
  std::vector<double> begins_us;  // of each interval's compute
  std::vector<double> stalls_us;  // that it waited before that
  // By move, when its copy out and in began and was done; 0 without one. What is computed again
  // comes in by that.
  std::vector<double> out_begins_us;
  std::vector<double> out_us;
  std::vector<double> in_begins_us;
  std::vector<double> in_us;
};

// The same step again and again, with moves of all kinds.
class StepSimulator {
 public:
  // InvalidArgument for a record that is not valid, and for a link that was not measured. `step`
  // has to outlive the simulator.
  static absl::StatusOr<StepSimulator> Create(const StepTrace& step, const LinkCalibration& link);

  // InvalidArgument for a move that is impossible in the step.
  absl::StatusOr<StepTimes> Run(absl::Span<const StepMove> moves) const;

 private:
  StepSimulator(const StepTrace& step, const LinkCalibration& link, const LinkRates& rates);

  const StepTrace* step_;
  LinkCalibration link_;
  LinkRates rates_;
  std::vector<size_t> leaves_from_;  // by object, the first use at which its copy out may begin
};

// Errors as those of StepSimulator.
absl::StatusOr<StepTimes> SimulateStep(const StepTrace& step, absl::Span<const StepMove> moves,
                                       const LinkCalibration& link);

}  // namespace pinion

#endif  // PINION_ENGINE_PLANNER_STEP_SIMULATION_H_
