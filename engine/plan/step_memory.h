// How much a step has on the device, stretch by stretch, if its objects are moved as planned.
//
//   std::vector<int64_t> bytes = DeviceBytes(step, plan.moves);      // bytes[i] at most in stretch
//   i
//
// Thread safety: pure functions.

#ifndef PINION_ENGINE_PLAN_STEP_MEMORY_H_
#define PINION_ENGINE_PLAN_STEP_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "pinion/engine/plan/step_lives.h"
#include "pinion/engine/plan/step_plan.h"
#include "pinion/engine/plan/step_record.h"

namespace pinion {

// Where one object of a valid record is on the device if it is not moved: in the stretches from
// `life.made` to this one.
size_t LastStretchOf(const StepObject& object, const ObjectLife& life,
                     const std::vector<size_t>& operator_ends);

// At the peak of each stretch, of a valid record with moves that are possible in it.
std::vector<int64_t> DeviceBytes(const StepRecord& step, absl::Span<const StepMove> moves);

}  // namespace pinion

#endif  // PINION_ENGINE_PLAN_STEP_MEMORY_H_
