// How the rounds of a loop over objects that visit a device may run, where a round needs more than
// the window holds (visit_schedule.h, which tries them and takes the one that fetches the least).
//
//   for (const VisitLoop& loop : LoopsWithin({{0, 4 << 20}, {1, 4 << 20}, ...}, 12 << 20)) ...
//
// Thread safety: none.

#ifndef PINION_ENGINE_SCHEDULE_VISIT_LOOP_H_
#define PINION_ENGINE_SCHEDULE_VISIT_LOOP_H_

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

namespace pinion {

struct SizedObject {
  uint32_t object = 0;
  uint64_t size_bytes = 0;
};

struct VisitLoop {
  enum class Kind {
    kNoneStays,
    kShareStays,   // spread over the round, beside room for the two largest
    kAllMoveOn,    // from such a share on, beside room for the one that comes
    kLargestStay,  // and a share of the others, beside room for three of those
  };
  Kind kind = Kind::kNoneStays;
  std::vector<uint32_t> stay;  // in the first round, and where none moves on in the next ones
  // Where all move on: of what is in use and what comes next, as far as is looked ahead.
  uint64_t most_ahead_bytes = UINT64_MAX;

  bool operator==(const VisitLoop& other) const = default;
};

// At most one of each kind, first of all that none stays: the only one where all of them fit in the
// window, or where it has no room for more than what is used and what comes next. `round` is each
// object once, by its first use.
std::vector<VisitLoop> LoopsWithin(const std::vector<SizedObject>& round, uint64_t window_bytes);

// When loops are tried again, as the window is another one. A trial does some rounds of each loop.
// In windows that go on changing there is one in eight rounds therefore, but for the first few; a
// window that stays is tried within eight rounds.
class LoopTrials {
 public:
  void OnRound() { rounds_ = std::min(rounds_ + 1, kMostRounds); }
  bool IsDue(uint64_t window_bytes) const {
    if (!tried_window_bytes_.has_value()) return true;
    return *tried_window_bytes_ != window_bytes && rounds_ >= kRoundsOfTrial;
  }
  void OnTrial(uint64_t window_bytes) {
    tried_window_bytes_ = window_bytes;
    rounds_ -= std::min(rounds_, kRoundsOfTrial);
    ++count_;
  }
  // Something else is done from now on.
  void Forget() { tried_window_bytes_.reset(); }
  uint64_t count() const { return count_; }

 private:
  static constexpr uint64_t kRoundsOfTrial = 8;                // from one to the next
  static constexpr uint64_t kMostRounds = 3 * kRoundsOfTrial;  // that are saved up

  std::optional<uint64_t> tried_window_bytes_;
  uint64_t rounds_ = kMostRounds;  // saved up for trials
  uint64_t count_ = 0;
};

}  // namespace pinion

#endif  // PINION_ENGINE_SCHEDULE_VISIT_LOOP_H_
