// What a step that is planned within a memory target, and weights that visit the device within the
// same one, want to know of each other.
//
// Plain data.

#ifndef PINION_ENGINE_SCHEDULE_SET_ASIDE_H_
#define PINION_ENGINE_SCHEDULE_SET_ASIDE_H_

#include <cstdint>

namespace pinion {

// Of the target, for weights.
struct SetAside {
  uint64_t least_bytes = 0;   // in any case: the largest layer
  uint64_t enough_bytes = 0;  // if the step's least memory leaves so much; at least `least_bytes`

  bool operator==(const SetAside& other) const = default;
};

// All that is no visiting weight takes at most so much until the step ends.
struct StepPromise {
  uint64_t most_bytes = 0;
  // Something leaves and comes back: what is not taken yet is for what comes.
  bool moves = false;
};

}  // namespace pinion

#endif  // PINION_ENGINE_SCHEDULE_SET_ASIDE_H_
