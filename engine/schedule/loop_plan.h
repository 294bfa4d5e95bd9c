// Which streamed weights stay on the device while a model repeats the same pass over more of them
// than fit, as in inference.
//
//   const LoopPlan loop = PlanLoop({{0, 4 << 20}, {1, 4 << 20}, {2, 4 << 20}, ...}, 12 << 20);
//
// Pure functions.

#ifndef PINION_ENGINE_SCHEDULE_LOOP_PLAN_H_
#define PINION_ENGINE_SCHEDULE_LOOP_PLAN_H_

#include <cstdint>
#include <vector>

namespace pinion {

struct SizedObject {
  uint32_t object = 0;
  uint64_t size_bytes = 0;
};

struct LoopPlan {
  std::vector<uint32_t> stay;  // objects that stay on the device
  // A limit means that the loop moves on: objects stay in its first round alone. In later rounds
  // each object is evicted after its use, and fetched again as early as the limit of bytes ahead,
  // with those of the object in use, permits.
  uint64_t most_ahead_bytes = UINT64_MAX;

  bool moves_on() const { return most_ahead_bytes != UINT64_MAX; }
  bool operator==(const LoopPlan& other) const = default;
};

// Returns the loop that fetches the fewest bytes a round. `round` has each object once, in the
// order of use. No object stays if all fit in the window, or if two objects fill the window.
LoopPlan PlanLoop(const std::vector<SizedObject>& round, uint64_t window_bytes);

}  // namespace pinion

#endif  // PINION_ENGINE_SCHEDULE_LOOP_PLAN_H_
