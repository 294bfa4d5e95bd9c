#include "pinion/device/cuda/poll_until.h"

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace {

using ::pinion::testing::IsOkAndHolds;
using ::pinion::testing::StatusIs;

// A simulated clock: a query takes 1 us, and a sleep is 50 us late, Linux's default timer slack.
class FakePollClock final : public PollClock {
 public:
  absl::Duration Now() override { return now_; }
  void Yield() override { ++yields_; }
  void Sleep(absl::Duration duration) override {
    ++sleeps_;
    now_ += duration + absl::Microseconds(50);
  }

  // Returns a query that is true from `at` on.
  auto DoneAt(absl::Duration at) {
    return [this, at]() -> absl::StatusOr<bool> {
      ++questions_;
      now_ += absl::Microseconds(1);
      return now_ >= at;
    };
  }

  int64_t questions() const { return questions_; }
  int64_t yields() const { return yields_; }
  int64_t sleeps() const { return sleeps_; }

 private:
  absl::Duration now_;
  int64_t questions_ = 0;
  int64_t yields_ = 0;
  int64_t sleeps_ = 0;
};

TEST(PollUntilTest, AWaitIsAtMostTwoPercentLongerThanWhatItWaitsFor) {
  for (absl::Duration at = absl::Microseconds(10); at < absl::Seconds(2); at *= 1.07) {
    FakePollClock clock;
    ASSERT_THAT(PollUntil(clock.DoneAt(at), absl::InfiniteDuration(), clock), IsOkAndHolds(true));
    EXPECT_LE(clock.Now(), at * 1.02 + absl::Microseconds(2)) << at;
  }
}

TEST(PollUntilTest, ALongWaitSleepsMostOfTheTime) {
  FakePollClock clock;
  ASSERT_THAT(PollUntil(clock.DoneAt(absl::Seconds(1)), absl::InfiniteDuration(), clock),
              IsOkAndHolds(true));
  EXPECT_GT(clock.sleeps(), 900);
  EXPECT_LT(clock.questions(), 6000);
}

TEST(PollUntilTest, AShortWaitNeitherSleepsNorYields) {
  FakePollClock clock;
  ASSERT_THAT(PollUntil(clock.DoneAt(absl::Microseconds(40)), absl::InfiniteDuration(), clock),
              IsOkAndHolds(true));
  EXPECT_EQ(clock.sleeps() + clock.yields(), 0);
}

TEST(PollUntilTest, AWaitYieldsFromFiftyMicrosecondsOn) {
  for (const int64_t expected : {0, 1}) {
    FakePollClock clock;
    ASSERT_THAT(
        PollUntil(clock.DoneAt(absl::Microseconds(50 + expected)), absl::InfiniteDuration(), clock),
        IsOkAndHolds(true));
    EXPECT_EQ(clock.yields(), expected);
  }
}

// Every sleep may be 50 us late, which is two percent of 2500 us.
TEST(PollUntilTest, AWaitSleepsAfterTwoAndAHalfMilliseconds) {
  for (const int64_t expected : {0, 1}) {
    FakePollClock clock;
    ASSERT_THAT(PollUntil(clock.DoneAt(absl::Microseconds(2501 + expected)),
                          absl::InfiniteDuration(), clock),
                IsOkAndHolds(true));
    EXPECT_EQ(clock.sleeps(), expected);
  }
}

TEST(PollUntilTest, AWaitThatIsTooShortToSleepInItYields) {
  FakePollClock clock;
  ASSERT_THAT(PollUntil(clock.DoneAt(absl::Microseconds(500)), absl::InfiniteDuration(), clock),
              IsOkAndHolds(true));
  EXPECT_EQ(clock.sleeps(), 0);
  EXPECT_GT(clock.yields(), 400);
}

TEST(PollUntilTest, TheTimeoutEndsTheWaitAndIsNotSleptThrough) {
  for (int tenths = 1000; tenths < 1020; ++tenths) {
    const absl::Duration timeout = absl::Microseconds(100) * tenths;
    FakePollClock clock;
    EXPECT_THAT(PollUntil(clock.DoneAt(absl::Hours(1)), timeout, clock), IsOkAndHolds(false));
    EXPECT_GE(clock.Now(), timeout);
    EXPECT_LE(clock.Now(), timeout + absl::Microseconds(100));
  }
}

TEST(PollUntilTest, AtTheTimeoutItselfNothingIsAskedAgain) {
  FakePollClock clock;
  EXPECT_THAT(PollUntil(clock.DoneAt(absl::Hours(1)), absl::Microseconds(10), clock),
              IsOkAndHolds(false));
  EXPECT_EQ(clock.questions(), 10);
}

TEST(PollUntilTest, WhatIsDoneNeedsNoTime) {
  FakePollClock clock;
  EXPECT_THAT(PollUntil(clock.DoneAt(absl::ZeroDuration()), absl::ZeroDuration(), clock),
              IsOkAndHolds(true));
  EXPECT_THAT(PollUntil(clock.DoneAt(absl::Hours(1)), absl::ZeroDuration(), clock),
              IsOkAndHolds(false));
}

TEST(PollUntilTest, AnErrorEndsTheWait) {
  FakePollClock clock;
  const auto failing = []() -> absl::StatusOr<bool> { return absl::InternalError("broken"); };
  EXPECT_THAT(PollUntil(failing, absl::InfiniteDuration(), clock),
              StatusIs(absl::StatusCode::kInternal));
}

// The wall clock may be adjusted at any time; a deadline must not depend on it.
TEST(PollUntilTest, TheRealClockRuns) {
  const absl::Duration before = SteadyPollClock().Now();
  SteadyPollClock().Sleep(absl::Microseconds(10));
  EXPECT_GE(SteadyPollClock().Now(), before + absl::Microseconds(10));
}

}  // namespace
}  // namespace pinion
