// Measures the host's cost of recording a planned step. A session that still records the step takes
// turns with a session that knows it.
//
//   PINION_ASSIGN_OR_RETURN(const RecordedStepCost cost, MeasureRecordedStep(step, new_session,
//   21)); report.AddRow(cost.ToRow());
//
// The next step's begin reads and plans the record. That cost is reported separately.
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
  double recorded_us = 0;      // planned and recorded
  double planned_us = 0;       // the same step, planned only
  double planning_us = 0;      // at the begin of the step after a recorded one
  double recorded_events = 0;  // events per tensor
  double planned_events = 0;

  double ratio() const { return recorded_us / planned_us; }
  nlohmann::ordered_json ToRow() const;
};

// Creates a session with a memory target on a device.
using NewTargetSession = std::function<absl::StatusOr<std::shared_ptr<OffloadSession>>(
    std::shared_ptr<Device> device, uint64_t memory_target_bytes)>;

// The target has room for half of the saved bytes. Internal if recording was on or off against
// expectation.
absl::StatusOr<RecordedStepCost> MeasureRecordedStep(const SavingStep& step,
                                                     const NewTargetSession& new_session,
                                                     int repeats);

}  // namespace pinion

#endif  // PINION_BENCH_RECORDED_STEP_H_
