// Creates the schedule that a session's options ask for.

#ifndef PINION_HOOKS_ACTIVATIONS_OFFLOAD_SCHEDULES_H_
#define PINION_HOOKS_ACTIVATIONS_OFFLOAD_SCHEDULES_H_

#include <memory>

#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/schedule/offload_schedule.h"
#include "pinion/engine/schedule/planned_schedule.h"
#include "pinion/engine/schedule/window_schedule.h"
#include "pinion/hooks/activations/offload_options.h"

namespace pinion {

// A schedule, with its derived types where they apply.
struct ChosenSchedule {
  OffloadSchedule* operator->() const { return schedule.get(); }

  std::unique_ptr<OffloadSchedule> schedule;
  PlannedSchedule* target = nullptr;   // the same, if it is one
  WindowSchedule* counting = nullptr;  // the same, if its window is one of tensors
};

// A PlannedSchedule with a memory target, a WindowSchedule without.
ChosenSchedule ScheduleFor(const OffloadOptions& options, const LinkCalibration& link);

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_OFFLOAD_SCHEDULES_H_
