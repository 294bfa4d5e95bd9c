// Creates the schedule that a session's options ask for.

#ifndef PINION_HOOKS_ACTIVATIONS_OFFLOAD_SCHEDULES_H_
#define PINION_HOOKS_ACTIVATIONS_OFFLOAD_SCHEDULES_H_

#include <memory>

#include "pinion/engine/plan/link_calibration.h"
#include "pinion/engine/plan/offload_schedule.h"
#include "pinion/engine/plan/target_schedule.h"
#include "pinion/engine/plan/window_schedule.h"
#include "pinion/hooks/activations/offload_options.h"

namespace pinion {

// A schedule, with its derived types where they apply.
struct ChosenSchedule {
  OffloadSchedule* operator->() const { return schedule.get(); }

  std::unique_ptr<OffloadSchedule> schedule;
  TargetSchedule* target = nullptr;    // null without a memory target
  WindowSchedule* counting = nullptr;  // null without a window in tensors
};

// Returns a TargetSchedule with a memory target, else a WindowSchedule.
ChosenSchedule ScheduleFor(const OffloadOptions& options, const LinkCalibration& link);

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_OFFLOAD_SCHEDULES_H_
