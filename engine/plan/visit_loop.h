// Which streamed weights stay on the device while a model repeats the same pass over more of them
// than fit, as in inference.
//
//   for (const uint32_t object : ResidentInLoop({{0, 4 << 20}, {1, 4 << 20}, ...}, 12 << 20)) ...
//
// Pure: the bytes that a pass fetches are those of the objects that do not stay.

#ifndef PINION_ENGINE_PLAN_VISIT_LOOP_H_
#define PINION_ENGINE_PLAN_VISIT_LOOP_H_

#include <cstdint>
#include <vector>

namespace pinion {

struct SizedObject {
  uint32_t object = 0;
  uint64_t size_bytes = 0;
};

// Returns the objects that stay. `round` has each object once, in the order of use. None stays
// where all fit in the window, and where it has room for two objects at most.
std::vector<uint32_t> ResidentInLoop(const std::vector<SizedObject>& round, uint64_t window_bytes);

}  // namespace pinion

#endif  // PINION_ENGINE_PLAN_VISIT_LOOP_H_
