#include "pinion/engine/schedule/residency_tracker.h"

#include "gtest/gtest.h"

namespace pinion::testing {
namespace residency_tracker_test {

TEST(ResidencyTracker, WhatAForgottenPlanWantedAwayIsNotOverdue) {
  ResidencyTracker places;
  places.Add(0, 100);
  places.WantAway(0, /*until=*/5, /*frees=*/true, /*now=*/2);
  EXPECT_EQ(places.overdue_bytes(), 100u);
  places.ForgetPlan();
  EXPECT_EQ(places.overdue_bytes(), 0u);
}

}  // namespace residency_tracker_test
}  // namespace pinion::testing
