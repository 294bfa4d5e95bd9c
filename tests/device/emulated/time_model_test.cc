#include "pinion/device/emulated/time_model.h"

#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/device/emulated/deferred_effects.h"
#include "pinion/device/emulated/engines.h"
#include "pinion/tests/device/emulated/time_model_fixture.h"

namespace pinion {
namespace {

using ::testing::HasSubstr;

TEST_F(TimeModelTest, CopyTakesItsLatencyAndItsBytes) {
  ExpectEnd(Copy(in_, Cost(kIn, kTenMb, 0, /*latency_ms=*/0.25)), 1.25);
  ExpectEnd(Copy(in_, Cost(kIn, 0, 0, /*latency_ms=*/0.25)), 1.5);
}

TEST_F(TimeModelTest, CopiesOfOneStreamFollowEachOther) {
  Copy(in_, Cost(kIn, kTenMb, 0, 0.25));
  ExpectEnd(Copy(in_, Cost(kIn, kTenMb, 0, 0.25)), 2.5);
  ASSERT_EQ(done_.size(), 2u);
  EXPECT_NEAR(done_[1].start_ms, 1.25, kExact);
}

class OneCopyAtATimeTest : public TimeModelTest {
 protected:
  OneCopyAtATimeTest() : TimeModelTest(Link(), 1) {}

 private:
  static LinkModel Link() {
    LinkModel link = RoundLink();
    link.one_copy_at_a_time = true;
    return link;
  }
};

TEST_F(OneCopyAtATimeTest, CopiesOfOneDirectionAreServedInTheOrderInWhichTheyCame) {
  const int second = time_.AddStream(0, "emu:0/in2");
  const int third = time_.AddStream(0, "emu:0/in3");
  Copy(in_, Cost(kIn, kTenMb, 0, 0.25));
  Copy(in_, Cost(kIn, kTenMb, 0, 0.25));  // ready after the others
  Copy(third, Cost(kIn, kTenMb, 0, 0.25));
  const StreamPoint last = Copy(second, Cost(kIn, kTenMb, 0, 0.25));
  ExpectEnd(last, 3 * 1.25);
  ASSERT_EQ(done_.size(), 3u);
  EXPECT_EQ(done_[1].stream, third);
  EXPECT_NEAR(done_[1].start_ms, 1.25, kExact);
  ExpectEnd(time_.Tail(in_), 4 * 1.25);
}

TEST_F(OneCopyAtATimeTest, ACopyBehindAStuckOneIsStuckAndTheStuckOneIsNamed) {
  const int second = time_.AddStream(0, "emu:0/in2");
  // The copy out is stuck too, but delays only its own stream.
  Copy(out_, Cost(kOut, kTenMb, 0, kForever));
  Copy(out_, Cost(kIn, kTenMb));
  Copy(in_, Cost(kIn, kTenMb, 0, kForever));
  const StreamPoint waiting = Copy(second, Cost(kIn, kTenMb));
  EXPECT_EQ(time_.RunUntil(waiting, kForever), Outcome::kStuck);
  EXPECT_EQ(
      time_.WhyPending(waiting),
      "copy #2 on emu:0/in (which emu:0/in2 waits for), which is stuck and will never finish");
}

TEST(TimeModelOfTwoDevicesTest, ACopyThatWaitsForItsTurnIsBehindTheCopyOfItsOwnDevice) {
  LinkModel link = RoundLink();
  link.one_copy_at_a_time = true;
  TimeModel time(link, 2);
  const int other = time.AddStream(0, "emu:0/in"), first = time.AddStream(1, "emu:1/in"),
            second = time.AddStream(1, "emu:1/in2");
  time.AddCopy(other, "copy", 1, Cost(kIn, kTenMb, 0));
  time.AddCopy(first, "copy", 2, Cost(kIn, kTenMb, 1));
  const StreamPoint waiting = time.AddCopy(second, "copy", 3, Cost(kIn, kTenMb, 1));
  for (const int stream : {first, second}) time.AddKernel(stream, "kernel", 4, 1);
  EXPECT_EQ(time.WhyPending(waiting),
            "copy #2 on emu:1/in (which emu:1/in2 waits for), which is still running");
}

TEST_F(TimeModelTest, OfCopiesThatShareALinkEachIsBehindItself) {
  Copy(in_, Cost(kIn, kTenMb));
  const StreamPoint second = Copy(time_.AddStream(0, "emu:0/in2"), Cost(kIn, kTenMb));
  EXPECT_EQ(time_.WhyPending(second), "copy #2 on emu:0/in2, which is still running");
}

TEST_F(OneCopyAtATimeTest, TheOtherDirectionHasAnEngineOfItsOwn) {
  Copy(in_, Cost(kIn, kTenMb));
  RunToEnd(Copy(out_, Cost(kOut, kTenMb)));
  EXPECT_NEAR(time_.now_ms(), 3, kExact) << "2 ms of half its bandwidth, 1 ms of all";
}

TEST_F(TimeModelTest, ACopyThatComesLaterSharesWhatIsLeftOfTheFirst) {
  const int second = time_.AddStream(0, "emu:0/in2");
  const StreamPoint first = Copy(in_, Cost(kIn, kTenMb, 0, /*latency_ms=*/0.25));
  Copy(second, Cost(kIn, kTenMb, 0, /*latency_ms=*/0.75));  // starts at half of the first
  ExpectEnd(first, 1.75);
}

TEST_F(TimeModelTest, ACopyWhoseRateFallsAndRisesAgainMovesWhatEachRateAllows) {
  const StreamPoint in = Copy(in_, Cost(kIn, 3 * kTenMb));
  Copy(out_, Cost(kOut, 2'500'000, 0, /*latency_ms=*/1));  // halves the other rate for 1 ms
  ExpectEnd(in, 3.5);
}

TEST_F(TimeModelTest, CopiesOfOneDirectionShareItsBandwidth) {
  const int second = time_.AddStream(0, "emu:0/in2");
  const StreamPoint small = Copy(in_, Cost(kIn, kTenMb));
  const StreamPoint large = Copy(second, Cost(kIn, 3 * kTenMb));
  ExpectEnd(small, 2);  // each has half of the link
  ExpectEnd(large, 4);  // the link carried 40 MB without a gap
}

TEST_F(TimeModelTest, BothDirectionsAtOnceGetTheDuplexRates) {
  const StreamPoint in = Copy(in_, Cost(kIn, kTenMb));     // 2 ms at the duplex rate
  const StreamPoint out = Copy(out_, Cost(kOut, kTenMb));  // then the second half alone
  ExpectEnd(in, 2);
  ExpectEnd(out, 3);
}

TEST_F(TimeModelTest, LatencyDoesNotDisturbTheOtherDirection) {
  const StreamPoint in = Copy(in_, Cost(kIn, kTenMb));
  Copy(out_, Cost(kOut, kTenMb, 0, /*latency_ms=*/1));
  ExpectEnd(in, 1);
}

TEST_F(TimeModelTest, CopyLimitedByItselfLeavesItsTimeAloneToTheRate) {
  CopyCost pageable = Cost(kIn, kTenMb);
  pageable.rate_limit = 2.5e6;
  ExpectEnd(Copy(in_, pageable), 4);
}

TEST_F(TimeModelTest, TimesDoNotDependOnHowOftenTheClockIsLookedAt) {
  const StreamPoint in = Copy(in_, Cost(kIn, 12'345'677));
  Copy(out_, Cost(kOut, 7'654'321));
  TimeModel other(RoundLink(), 1);
  other.AddStream(0, "c");
  other.AddStream(0, "i");
  other.AddStream(0, "o");
  other.AddCopy(in_, "copy", 2, Cost(kIn, 12'345'677));
  other.AddCopy(out_, "copy", 2, Cost(kOut, 7'654'321));
  for (int i = 0; i < 1000; ++i) other.Spend(0.0003);
  RunToEnd(in);
  ASSERT_EQ(other.RunUntil(in, kForever), Outcome::kDone);
  EXPECT_EQ(time_.now_ms(), other.now_ms());
}

TEST(TimeModelOfTwoDevicesTest, CopiesOfAnotherDeviceDoNotMoveTheEndOfACopyByABit) {
  std::vector<double> ends;
  for (const int others : {0, 20}) {
    TimeModel time(RoundLink(), 2);
    const int mine = time.AddStream(0, "emu:0/in"), other = time.AddStream(1, "emu:1/in");
    const StreamPoint copy = time.AddCopy(mine, "copy", 1, Cost(kIn, 98'765'431, 0));
    for (int i = 0; i < others; ++i) time.AddCopy(other, "copy", 2, Cost(kIn, 543'211, 1));
    ASSERT_EQ(time.RunUntil(copy, kForever), Outcome::kDone);
    ends.push_back(time.now_ms());
  }
  EXPECT_EQ(ends[0], ends[1]);
}

TEST_F(TwoDevicesTest, DevicesShareTheHost) {
  const StreamPoint first = Copy(in_, Cost(kIn, 6'000'000, 0));
  const StreamPoint second = Copy(in1_, Cost(kIn, 16'000'000, 1));
  ExpectEnd(first, 1);   // each has 6 of the host's 12 GB/s
  ExpectEnd(second, 2);  // then 10 GB/s alone
}

TEST_F(TwoDevicesTest, WhatASlowDeviceLeavesOfTheHostGoesToTheOther) {
  // Device 0 is limited to its duplex rate of 5 GB/s, so device 1 gets 7 of the host's 12 GB/s.
  Copy(out_, Cost(kOut, 10 * kTenMb, 0));
  Copy(in_, Cost(kIn, 10 * kTenMb, 0));
  ExpectEnd(Copy(in1_, Cost(kIn, 7'000'000, 1)), 1);
}

TEST_F(TwoDevicesTest, TheSlowDeviceMayBeTheLaterOne) {
  const int out1 = time_.AddStream(1, "emu:1/out");
  Copy(out1, Cost(kOut, 10 * kTenMb, 1));
  Copy(in1_, Cost(kIn, 10 * kTenMb, 1));
  ExpectEnd(Copy(in_, Cost(kIn, 7'000'000, 0)), 1);
}

TEST_F(TimeModelTest, KernelsOfTwoStreamsTakeTurnsInTheOrderTheyBecameReady) {
  const int second = time_.AddStream(0, "emu:0/second");
  const StreamPoint copy = Copy(in_, Cost(kIn, kTenMb));
  time_.AddWait(compute_, copy);
  const StreamPoint late = Kernel(compute_, 1);  // submitted first, ready at 1 ms
  const StreamPoint early = Kernel(second, 3);
  ExpectEnd(early, 3);
  ExpectEnd(late, 4);
  EXPECT_NEAR(time_.stats(0).compute_busy_ms, 4, kExact);
  EXPECT_NEAR(time_.stats(0).stalled_on_copies_ms, 1, kExact);
}

TEST_F(TimeModelTest, KernelsOfManyStreamsRunOneAfterTheOther) {
  const int second = time_.AddStream(0, "emu:0/second");
  const int third = time_.AddStream(0, "emu:0/third");
  Kernel(compute_, 1);
  Kernel(second, 2);
  RunToEnd(Kernel(third, 4));
  ASSERT_EQ(done_.size(), 3u);
  EXPECT_EQ(done_[1].stream, second);
  EXPECT_NEAR(done_[1].start_ms, 1, kExact);
  EXPECT_NEAR(done_[1].end_ms, 3, kExact);
  EXPECT_EQ(done_[2].stream, third);
  EXPECT_NEAR(done_[2].start_ms, 3, kExact);
  EXPECT_NEAR(done_[2].end_ms, 7, kExact);
}

TEST_F(TimeModelTest, WorkStartsNoEarlierThanItIsSubmitted) {
  time_.Spend(5);
  ExpectEnd(Kernel(compute_, 1), 6);
}

TEST_F(TimeModelTest, AStampIsTheTimeAtWhichItsStreamGetsThere) {
  const auto stamp = std::make_shared<double>(-1);
  Kernel(compute_, 2);
  time_.AddStamp(compute_, stamp);
  const StreamPoint end = Kernel(compute_, 1);
  EXPECT_EQ(*stamp, -1);
  RunToEnd(end);
  EXPECT_NEAR(*stamp, 2, kExact);
}

TEST_F(TimeModelTest, StatsCountWorkWhenItIsDoneAndStartAgainAtAReset) {
  Copy(in_, Cost(kIn, kTenMb));
  Copy(out_, Cost(kOut, kTenMb));
  Kernel(compute_, 0.5);
  time_.Spend(1);
  EXPECT_EQ(time_.stats(0).kernels, 1u);
  EXPECT_EQ(time_.stats(0).copies, 0u);
  EXPECT_NEAR(time_.stats(0).h2d_busy_ms, 1, kExact);
  EXPECT_NEAR(time_.stats(0).compute_busy_ms, 0.5, kExact);
  time_.ResetStats(0);
  time_.Spend(9);
  const TimeStats& stats = time_.stats(0);
  EXPECT_EQ(stats.kernels, 0u);
  EXPECT_EQ(stats.compute_busy_ms, 0);
  EXPECT_EQ(stats.copies, 2u);
  EXPECT_EQ(stats.h2d_bytes, kTenMb);
  EXPECT_EQ(stats.d2h_bytes, kTenMb);
  EXPECT_NEAR(stats.h2d_busy_ms, 1, kExact);
  EXPECT_NEAR(stats.d2h_busy_ms, 2, kExact);
}

TEST_F(TimeModelTest, TimeoutPassesAndTheWorkGoesOn) {
  const StreamPoint kernel = Kernel(compute_, 3);
  EXPECT_EQ(time_.RunUntil(kernel, 1), Outcome::kTimeout);
  EXPECT_NEAR(time_.now_ms(), 1, kExact);
  EXPECT_EQ(time_.WhyPending(kernel), "kernel #1 on emu:0/compute, which is still running");
  ExpectEnd(kernel, 3);
}

TEST_F(TimeModelTest, WhatEndsAsTheTimeoutPassesIsDone) {
  const StreamPoint kernel = Kernel(compute_, 3);
  EXPECT_EQ(time_.RunUntil(kernel, 3), Outcome::kDone);
}

TEST_F(TimeModelTest, StuckCopyIsNamedAtOnceThroughWhoeverWaitsForIt) {
  const StreamPoint copy = Copy(in_, Cost(kIn, kTenMb, 0, kForever));
  const StreamPoint wait = time_.AddWait(compute_, copy);
  EXPECT_EQ(time_.RunUntil(wait, kForever), Outcome::kStuck);
  EXPECT_EQ(time_.now_ms(), 0);
  EXPECT_THAT(time_.WhyPending(wait), HasSubstr("copy #2 on emu:0/in"));
  EXPECT_THAT(time_.WhyPending(wait), HasSubstr("emu:0/compute waits for"));
  EXPECT_THAT(time_.WhyPending(wait), HasSubstr("never finish"));
  EXPECT_EQ(time_.RunUntil(wait, 7), Outcome::kStuck);
  EXPECT_NEAR(time_.now_ms(), 7, kExact);
}

TEST_F(TimeModelTest, StuckCopyDoesNotSlowTheOtherDirectionDown) {
  Copy(in_, Cost(kIn, kTenMb, 0, kForever));
  ExpectEnd(Copy(out_, Cost(kOut, kTenMb)), 2);
}

}  // namespace
}  // namespace pinion
