// The window of streamed weights (weight_prefetcher.h) within a memory target. Leaves the rest of
// the program the bytes that it has, and those that it will have allocated by the next use.
//
//   WindowPredictor room(target_bytes);
//   schedule.set_window_bytes(room.AtUse({.object = 3, .argument_bytes = n}, others, peak_bound));
//
// The allocations until the next use are predicted from earlier uses at the same place. A place is
// an object, forward or backward, and the index of the use since forward began. Without a graph,
// where forward may have no end, the index counts consecutive uses instead. The prediction is the
// most that was allocated after this place before, without subtracting frees, because what a step
// keeps may change. At a new place, or with larger arguments than before, the window is 0: then the
// used object alone is resident.
//
// While a session runs a planned step, its peak_bound bounds the rest of the program. The window is
// then what the target leaves beside the peak_bound, or beside the prediction if that is smaller
// and the step moves nothing. Moved tensors need their promised memory when they return.
//
// Thread safety: none; its owner's lock guards it.

#ifndef PINION_ENGINE_SCHEDULE_WINDOW_PREDICTOR_H_
#define PINION_ENGINE_SCHEDULE_WINDOW_PREDICTOR_H_

#include <cstdint>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "pinion/engine/schedule/reservation.h"

namespace pinion {

struct WeightUse {
  uint32_t object = 0;
  bool builds_graph = false;
  bool in_backward = false;
  uint64_t argument_bytes = 0;  // of the operator's arguments that are not streamed
};

// Device memory of everything except streamed weights.
struct OthersBytes {
  uint64_t current = 0;
  uint64_t allocated = 0;  // since the start, without subtracting frees
};

class WindowPredictor {
 public:
  explicit WindowPredictor(uint64_t target_bytes) : target_bytes_(target_bytes) {}

  // Returns the window from this use to the next one.
  uint64_t AtUse(const WeightUse& use, const OthersBytes& others,
                 const std::optional<PeakBound>& peak_bound);

 private:
  // The object, and the index of its use with both flags.
  using Place = std::pair<uint32_t, uint64_t>;
  struct Known {
    uint64_t argument_bytes = 0;   // the most so far
    uint64_t allocated_bytes = 0;  // the most that others allocated until the next use
  };
  struct Last {
    Place place;
    uint64_t argument_bytes = 0;
    OthersBytes others;
  };

  Place PlaceOf(const WeightUse& use);
  void NoteLast(const OthersBytes& others);

  const uint64_t target_bytes_;
  absl::flat_hash_map<Place, Known> known_;
  absl::flat_hash_map<Place, uint64_t> uses_;  // since forward began, by place without an index
  bool in_backward_ = false;                   // of the last use
  std::optional<Last> last_;
};

}  // namespace pinion

#endif  // PINION_ENGINE_SCHEDULE_WINDOW_PREDICTOR_H_
