#include "pinion/engine/schedule/step_matcher.h"

#include <memory>

#include "gtest/gtest.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/schedule/cached_plan.h"
#include "pinion/engine/schedule/offload_schedule.h"
#include "pinion/tests/engine/planner/small_steps.h"

namespace pinion::testing {
namespace step_progress_test {

TEST(StepProgress, OfSeveralWithOneSignatureTheNextToComeIsTheNextOfTheKnownStep) {
  const auto known =
      std::make_shared<const KnownStep>(ForwardAndBackward(100, {7, 7, 7}), StepPlan());
  StepProgress progress;
  progress.Begin();
  const StepProgress::Saved first = progress.OnSaved(7);
  progress.Follow(known, *progress.MatchWith(*known));
  EXPECT_TRUE(progress.OnUsed(first.object, Use::kSaved));
  for (uint32_t i = 1; i < 3; ++i) {
    const StepProgress::Saved next = progress.OnSaved(7);
    EXPECT_TRUE(next.fits);
    EXPECT_EQ(progress.planned(next.object), i);
    EXPECT_TRUE(progress.OnUsed(next.object, Use::kSaved));
  }
  EXPECT_FALSE(progress.OnSaved(7).fits) << "the known step has no fourth one";
}

}  // namespace step_progress_test
}  // namespace pinion::testing
