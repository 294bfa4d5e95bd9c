// What it costs the host to record a step that runs as planned: a session that has just learned the
// step, and still records it, in turn with one that knows it well and does not.
//
//   PINION_ASSIGN_OR_RETURN(const RecordedStepCost cost, MeasureRecordedStep(step, new_session,
//   21)); report.AddRow(cost.ToRow());
//
// Of a record there is more to pay when the next step begins: it is read and planned then. That is
// told by itself.
//
// Thread safety: none.

#ifndef PINION_BENCH_RECORDED_STEP_H_
#define PINION_BENCH_RECORDED_STEP_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/status/statusor.h"
#include "pinion/bench/saving_step.h"
#include "pinion/device/device.h"
#include "pinion/hooks/activations/offload_session.h"

namespace pinion {

// Wall time of a whole step; the lower quartile of all repeats.
struct RecordedStepCost {
  SavingStep step;
  double recorded_us = 0;      // as planned, and recorded
  double planned_us = 0;       // the same step, as planned
  double planning_us = 0;      // at the begin of the step behind a recorded one
  double recorded_events = 0;  // that the device was asked for, per tensor
  double planned_events = 0;

  double ratio() const { return recorded_us / planned_us; }
  nlohmann::ordered_json ToRow() const;
};

// Sessions with a memory target of the caller's, each on the device that it is given.
using NewTargetSession = std::function<absl::StatusOr<std::shared_ptr<OffloadSession>>(
    std::shared_ptr<Device> device, uint64_t memory_target_bytes)>;

// With room for half of what the step saves. Internal where a step was recorded that should not
// have been, or the other way round.
absl::StatusOr<RecordedStepCost> MeasureRecordedStep(const SavingStep& step,
                                                     const NewTargetSession& new_session,
                                                     int repeats);

}  // namespace pinion

#endif  // PINION_BENCH_RECORDED_STEP_H_
