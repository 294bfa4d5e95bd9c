#include "pinion/engine/schedule/step_matcher.h"

#include <memory>

#include "gtest/gtest.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/schedule/offload_schedule.h"
#include "pinion/engine/schedule/plan_cache.h"
#include "pinion/tests/engine/planner/small_steps.h"

namespace pinion::testing {
namespace step_matcher_test {

TEST(StepMatcher, OfSeveralWithOneSignatureTheNextToComeIsTheNextOfTheKnownStep) {
  const auto cached =
      std::make_shared<const CachedPlan>(ForwardAndBackward(100, {7, 7, 7}), StepPlan());
  StepMatcher progress;
  progress.Begin();
  const StepMatcher::Saved first = progress.OnSaved(7);
  progress.Follow(cached, *progress.MatchWith(*cached));
  EXPECT_TRUE(progress.OnUsed(first.object, AccessKind::kSaved));
  for (uint32_t i = 1; i < 3; ++i) {
    const StepMatcher::Saved next = progress.OnSaved(7);
    EXPECT_TRUE(next.fits);
    EXPECT_EQ(progress.planned(next.object), i);
    EXPECT_TRUE(progress.OnUsed(next.object, AccessKind::kSaved));
  }
  EXPECT_FALSE(progress.OnSaved(7).fits) << "the known step has no fourth one";
}

}  // namespace step_matcher_test
}  // namespace pinion::testing
