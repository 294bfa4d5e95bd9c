// What of a memory target is for others than the step that is planned within it: weights that visit
// the device.
//
// Plain data.

#ifndef PINION_ENGINE_PLAN_SET_ASIDE_H_
#define PINION_ENGINE_PLAN_SET_ASIDE_H_

#include <cstdint>

namespace pinion {

struct SetAside {
  uint64_t least_bytes = 0;   // in any case: the largest layer
  uint64_t enough_bytes = 0;  // if the step's least memory leaves so much; at least `least_bytes`
};

}  // namespace pinion

#endif  // PINION_ENGINE_PLAN_SET_ASIDE_H_
