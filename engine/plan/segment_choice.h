// Which segments of the step that runs are computed again: those that the known step says which it
// follows, or a mix that is tried, so that it can be recorded.
//
//   choice.OnBegin();                                     // a step begins
//   choice.Follow(known);                                 // or choice.Try(known)
//   std::optional<uint32_t> ordinal = choice.OnSegment(); // nothing: it is computed again
//   choice.Note(record);                                  // into the record of that step
//   choice.Learn(known_step, known_steps);                // and what is planned of it
//
// What a mix is worth is found out, not guessed: the step is recorded with it once, planned, and
// the plan is compared with the one without. The longer of the two is forgotten.
//
// Thread safety: none.

#ifndef PINION_ENGINE_PLAN_SEGMENT_CHOICE_H_
#define PINION_ENGINE_PLAN_SEGMENT_CHOICE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "pinion/engine/plan/known_step.h"
#include "pinion/engine/plan/known_steps.h"
#include "pinion/engine/plan/step_record.h"

namespace pinion {

class SegmentChoice {
 public:
  void OnBegin();
  // The step goes on as this one; null: as none, and what begins from now on is kept.
  void Follow(std::shared_ptr<const KnownStep> known);
  // The step, which begins like this one, is run with its mix.
  void Try(std::shared_ptr<const KnownStep> known);

  // The step that runs, or ran last, tries one.
  bool IsTrying() const { return tried_ != nullptr; }
  // The next segment begins. Its ordinal if it is kept.
  std::optional<uint32_t> OnSegment();
  // The known step has computed again what this one has so far, and no more.
  bool Fits(const KnownStep& known) const;

  // Marks the segments of the last step that were computed again.
  void Note(StepRecord& step) const;
  // Adds what was planned of the last step's record to those that are known. Where the step tried
  // the mix of another one, the shorter one of the two stays.
  void Learn(std::shared_ptr<const KnownStep> known, KnownSteps& known_steps);

 private:
  std::shared_ptr<const KnownStep> followed_;
  std::shared_ptr<const KnownStep> tried_;
  std::vector<bool> computed_again_;  // by ordinal, of the step that runs or ran last
};

}  // namespace pinion

#endif  // PINION_ENGINE_PLAN_SEGMENT_CHOICE_H_
