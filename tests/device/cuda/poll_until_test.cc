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

// Returns the clock after a wait for what is done at `at`.
FakePollClock AfterWaitUntil(absl::Duration at) {
  FakePollClock clock;
  EXPECT_THAT(PollUntil(clock.DoneAt(at), absl::InfiniteDuration(), clock), IsOkAndHolds(true));
  return clock;
}

TEST(PollUntilTest, AWaitIsAtMostTwoPercentLongerThanWhatItWaitsFor) {
  for (absl::Duration at = absl::Microseconds(10); at < absl::Seconds(2); at *= 1.07) {
    EXPECT_LE(AfterWaitUntil(at).Now(), at * 1.02 + absl::Microseconds(2)) << at;
  }
}

TEST(PollUntilTest, ALongWaitSleepsMostOfTheTime) {
  const FakePollClock clock = AfterWaitUntil(absl::Seconds(1));
  EXPECT_GT(clock.sleeps(), 900);
  EXPECT_LT(clock.questions(), 6000);
}

TEST(PollUntilTest, AShortWaitNeitherSleepsNorYields) {
  const FakePollClock clock = AfterWaitUntil(absl::Microseconds(40));
  EXPECT_EQ(clock.sleeps() + clock.yields(), 0);
}

TEST(PollUntilTest, AWaitYieldsFromFiftyMicrosecondsOn) {
  EXPECT_EQ(AfterWaitUntil(absl::Microseconds(50)).yields(), 0);
  EXPECT_EQ(AfterWaitUntil(absl::Microseconds(51)).yields(), 1);
}

// Every sleep may be 50 us late, which is two percent of 2500 us.
TEST(PollUntilTest, AWaitSleepsAfterTwoAndAHalfMilliseconds) {
  EXPECT_EQ(AfterWaitUntil(absl::Microseconds(2501)).sleeps(), 0);
  EXPECT_EQ(AfterWaitUntil(absl::Microseconds(2502)).sleeps(), 1);
}

TEST(PollUntilTest, AWaitThatIsTooShortToSleepInItYields) {
  const FakePollClock clock = AfterWaitUntil(absl::Microseconds(500));
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
