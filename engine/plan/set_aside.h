// How the plan of a step and streamed weights share one memory target.
//
// Thread safety: none; plain data.

#ifndef PINION_ENGINE_PLAN_SET_ASIDE_H_
#define PINION_ENGINE_PLAN_SET_ASIDE_H_

#include <cstdint>

namespace pinion {

// The part of the target for weights.
struct SetAside {
  uint64_t least_bytes = 0;   // always left for weights: the largest layer
  uint64_t enough_bytes = 0;  // left if the step fits beside it; at least `least_bytes`

  bool operator==(const SetAside& other) const = default;
};

// The bound on everything except streamed weights until the step ends.
struct StepPromise {
  uint64_t most_bytes = 0;
  bool moves = false;  // tensors are offloaded, and take unused bytes of the bound when they return
};

}  // namespace pinion

#endif  // PINION_ENGINE_PLAN_SET_ASIDE_H_
