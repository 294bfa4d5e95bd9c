// The two sides of a memory target: what streamed weights reserve of it, and the most that
// everything else takes.
//
// Plain data.

#ifndef PINION_ENGINE_SCHEDULE_RESERVATION_H_
#define PINION_ENGINE_SCHEDULE_RESERVATION_H_

#include <cstdint>

namespace pinion {

// Part of the target that is reserved for weights.
struct Reservation {
  uint64_t least_bytes = 0;   // in any case: the largest layer
  uint64_t enough_bytes = 0;  // if the step's least memory leaves it; at least `least_bytes`

  bool operator==(const Reservation& other) const = default;
};

// Upper bound, until the step ends, of all device memory but streamed weights.
struct PeakBound {
  uint64_t most_bytes = 0;
  // The step fetches objects again, so memory below the bound is reserved for them.
  bool moves = false;
};

}  // namespace pinion

#endif  // PINION_ENGINE_SCHEDULE_RESERVATION_H_
