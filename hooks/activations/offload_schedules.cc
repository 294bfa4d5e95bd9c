#include "pinion/hooks/activations/offload_schedules.h"

#include <utility>

#include "pinion/engine/link/packing.h"
#include "pinion/engine/schedule/window_schedule.h"

namespace pinion {
namespace {

WindowOptions WindowsOf(const OffloadOptions& options, const LinkCalibration& link) {
  static_assert(OffloadOptions::kAutoWindow == WindowOptions::kAuto);
  static_assert(OffloadOptions::kNoTensorWindow == WindowOptions::kNoTensors);
  return {.eviction_bytes = options.eviction_window_bytes,
          .eviction_tensors = options.eviction_window_tensors,
          .prefetch_bytes = options.prefetch_window_bytes,
          .full_batch_bytes = FullBatchBytes(link)};
}

}  // namespace

ChosenSchedule ScheduleFor(const OffloadOptions& options, const LinkCalibration& link) {
  const WindowOptions windows = WindowsOf(options, link);
  const uint64_t target_bytes = options.memory_target_bytes;
  if (target_bytes == OffloadOptions::kNoTarget) {
    auto schedule = std::make_unique<WindowSchedule>(windows);
    const bool counts = windows.eviction_tensors != WindowOptions::kNoTensors;
    WindowSchedule* const counting = counts ? schedule.get() : nullptr;
    return {.schedule = std::move(schedule), .counting = counting};
  }
  TargetOptions target = {.windows = windows, .link = link};
  if (target_bytes != OffloadOptions::kAutoTarget) target.memory_bytes = target_bytes;
  auto schedule = std::make_unique<PlannedSchedule>(target);
  PlannedSchedule* const by_plans = schedule.get();
  return {.schedule = std::move(schedule), .target = by_plans};
}

}  // namespace pinion
