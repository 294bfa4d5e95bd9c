// How much of a memory target objects that visit a device (visit_schedule.h) may have at each of
// their uses, beside all that others have allocated there and will have by the next use.
//
//   VisitRoom room(target_bytes);
//   schedule.set_window_bytes(room.AtUse({.object = 3, .argument_bytes = n}, others, promise));
//
// What a program allocates until the next use is not known, and nobody is asked before it does. So
// uses are told apart by their place: which object, forward or backward, which of its uses since
// forward began. (Where no graph is built forward may have no end: which of its uses in a row.) A
// use in a place that is known, whose operator gets no more bytes than before, is taken to be
// followed by at most the allocations that have followed one there. All of them count, as if
// nothing were freed in between: what is kept and what is not may change from step to step. A use
// in a new place, or of larger arguments, leaves no room: what is used is there, and nothing else.
//
// While a step runs as planned, all others take at most what it promises, and the room is what the
// target leaves beside that: not more where the step moves something, which comes when it is time.
//
// Thread safety: none; its owner's lock guards it.

#ifndef PINION_ENGINE_SCHEDULE_VISIT_ROOM_H_
#define PINION_ENGINE_SCHEDULE_VISIT_ROOM_H_

#include <cstdint>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "pinion/engine/schedule/set_aside.h"

namespace pinion {

struct VisitUse {
  uint32_t object = 0;
  bool builds_graph = false;
  bool in_backward = false;
  uint64_t argument_bytes = 0;  // of the operator, but for objects that visit
};

// Of all others on the device, now.
struct OthersBytes {
  uint64_t current = 0;
  uint64_t allocated = 0;  // from the start, whatever was freed since
};

class VisitRoom {
 public:
  explicit VisitRoom(uint64_t target_bytes) : target_bytes_(target_bytes) {}

  // The object is about to be used: how much all objects may have until the next use.
  uint64_t AtUse(const VisitUse& use, const OthersBytes& others,
                 const std::optional<StepPromise>& promise);

 private:
  // Which object, and which of its uses, with the two flags.
  using Place = std::pair<uint32_t, uint64_t>;
  struct Known {
    uint64_t argument_bytes = 0;   // at the most
    uint64_t allocated_bytes = 0;  // by others until the next use, at the most
  };
  struct Last {
    Place place;
    uint64_t argument_bytes = 0;
    OthersBytes others;
  };

  Place PlaceOf(const VisitUse& use);
  void NoteLast(const OthersBytes& others);

  const uint64_t target_bytes_;
  absl::flat_hash_map<Place, Known> known_;
  absl::flat_hash_map<Place, uint64_t> uses_;  // since forward began, by an object's first place
  bool in_backward_ = false;                   // of the last use
  std::optional<Last> last_;
};

}  // namespace pinion

#endif  // PINION_ENGINE_SCHEDULE_VISIT_ROOM_H_
