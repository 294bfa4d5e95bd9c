#include "pinion/engine/schedule/plan_validator.h"

#include <cstdint>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/engine/planner/step_plan.h"

namespace pinion::testing {
namespace plan_validator_test {

using ::testing::ElementsAre;

StepPlan Plan() {
  StepPlan plan;
  plan.step_us = 1000;
  plan.peak_bytes = 10'000;
  return plan;
}

// How many steps pass until the next one is due.
uint64_t StepsUntilDue(PlanValidator& watch) {
  uint64_t steps = 0;
  for (; !watch.IsDue(); ++steps) watch.OnStep();
  return steps;
}

TEST(PlanValidator, AStepIsOffWhoseTimeOrBytesDifferByMoreThanTwoPercent) {
  PlanValidator watch;
  EXPECT_FALSE(watch.IsOff(Plan(), {})) << "what could not be measured";
  EXPECT_FALSE(watch.IsOff(Plan(), {.step_us = 1019, .peak_bytes = 10'190}));
  EXPECT_FALSE(watch.IsOff(Plan(), {.step_us = 981, .peak_bytes = 9'810}));
  EXPECT_TRUE(PlanValidator().IsOff(Plan(), {.step_us = 1021})) << "slower";
  EXPECT_TRUE(PlanValidator().IsOff(Plan(), {.step_us = 979})) << "quicker";
  EXPECT_TRUE(PlanValidator().IsOff(Plan(), {.peak_bytes = 10'201})) << "more bytes";
  EXPECT_TRUE(PlanValidator().IsOff(Plan(), {.peak_bytes = 9'799})) << "fewer bytes";
}

TEST(PlanValidator, AStepThatHasMoreThanItMayIsOffHoweverLittleThatIs) {
  EXPECT_TRUE(PlanValidator().IsOff(Plan(), {.peak_bytes = 10'001}, 10'000));
  EXPECT_FALSE(PlanValidator().IsOff(Plan(), {.peak_bytes = 10'000}, 10'000));
  EXPECT_FALSE(PlanValidator().IsOff(Plan(), {}, 10'000));
}

TEST(PlanValidator, WhatNoRecordHasShownStaysFreeOnceAPlanOfANewRecordHasHadTooMuchAsWell) {
  PlanValidator watch;
  watch.IsOff(Plan(), {.peak_bytes = 10'050}, 10'000);
  EXPECT_EQ(watch.margin_bytes(), 0u) << "a new record may show it";
  watch.IsOff(Plan(), {.peak_bytes = 10'030}, 10'000);
  EXPECT_EQ(watch.margin_bytes(), 30u);
  watch.IsOff(Plan(), {.peak_bytes = 10'005}, 10'000);
  EXPECT_EQ(watch.margin_bytes(), 35u) << "and it was not enough";
  watch.IsOff(Plan(), {.peak_bytes = 10'000}, 10'000);
  watch.IsOff(Plan(), {.peak_bytes = 10'050}, 10'000);
  EXPECT_EQ(watch.margin_bytes(), 35u) << "the first one after one that was right";
}

TEST(PlanValidator, WhatEveryPlanIsOffByIsFoundOutOnce) {
  PlanValidator watch;
  EXPECT_TRUE(watch.IsOff(Plan(), {.step_us = 1500, .peak_bytes = 9'000}));
  StepPlan larger = Plan();
  larger.step_us *= 2;
  larger.peak_bytes *= 2;
  EXPECT_FALSE(watch.IsOff(larger, {.step_us = 3000, .peak_bytes = 18'000}));
  EXPECT_TRUE(watch.IsOff(larger, {.step_us = 3100, .peak_bytes = 18'000}));
  EXPECT_TRUE(watch.IsOff(larger, {.step_us = 3100, .peak_bytes = 19'000}));
}

TEST(PlanValidator, OneOfSoManyStepsIsDueUntilItWasMeasured) {
  PlanValidator watch;
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(StepsUntilDue(watch), PlanValidator::kEvery);
    watch.OnStep();
    EXPECT_TRUE(watch.IsDue());
    watch.IsOff(Plan(), {});
  }
}

TEST(PlanValidator, WhereStepsDifferFromTimeToTimeTheyAreMeasuredLessAndLessOften) {
  PlanValidator watch;
  std::vector<uint64_t> steps;
  for (int i = 0; i < 4; ++i) {
    steps.push_back(StepsUntilDue(watch) / PlanValidator::kEvery);
    watch.IsOff(Plan(), {.step_us = 2000.0 + 100 * i});
  }
  EXPECT_THAT(steps, ElementsAre(1, 2, 4, 8));
}

TEST(PlanValidator, OnceAPlanIsRightStepsAreMeasuredAsOftenAsAtFirst) {
  PlanValidator watch;
  for (int i = 0; i < 4; ++i) watch.IsOff(Plan(), {.step_us = 2000.0 + 100 * i});
  watch.IsOff(Plan(), {.step_us = 2300});
  EXPECT_EQ(StepsUntilDue(watch), PlanValidator::kEvery);
}

}  // namespace plan_validator_test
}  // namespace pinion::testing
