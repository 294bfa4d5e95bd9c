// Which of the steps that come are worth recording, by how many were known in a row.
//
//   if (pace.WantsRecord(known)) ...   // record the step that begins
//   pace.OnEnd(/*is_unknown=*/false);  // it has ended, and went on as a known one
//
// Thread safety: none.

#ifndef PINION_ENGINE_PLAN_RECORD_PACE_H_
#define PINION_ENGINE_PLAN_RECORD_PACE_H_

#include <algorithm>
#include <bit>
#include <cstdint>

#include "pinion/engine/plan/known_steps.h"

namespace pinion {

class RecordPace {
 public:
  static constexpr int kKnownInARow = 3;
  static constexpr int kKnownInARowForMixes = 16;

  bool WantsRecord(const KnownSteps& known) const {
    if (known_steps_ >= kKnownInARow) {
      return known_steps_ < kKnownInARowForMixes && known.AnyWantsMix();
    }
    // The longer no step has been known, the more are let pass before one is recorded: a program
    // whose steps are never alike has KnownSteps::kMax of them recorded while their number doubles.
    const uint64_t every = std::bit_floor((unknown_steps_ / KnownSteps::kMax) | 1);
    return unknown_steps_ % every == 0;
  }
  // The next two steps are worth it, whatever was known.
  void RecordAgain() { known_steps_ = std::min(known_steps_, kKnownInARow - 2); }
  void OnEnd(bool is_unknown) {
    known_steps_ = is_unknown ? 0 : std::min(known_steps_ + 1, kKnownInARowForMixes);
    unknown_steps_ = is_unknown ? unknown_steps_ + 1 : 0;
  }

 private:
  int known_steps_ = 0;         // since the last one that was not known
  uint64_t unknown_steps_ = 0;  // since the last one that was known
};

}  // namespace pinion

#endif  // PINION_ENGINE_PLAN_RECORD_PACE_H_
