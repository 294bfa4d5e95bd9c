// Time that counts as stalled on copies (time_stats.h).

#include "gtest/gtest.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/deferred_effects.h"
#include "pinion/device/emulated/time_model.h"
#include "pinion/tests/device/emulated/time_model_fixture.h"

namespace pinion {
namespace {

TEST_F(TimeModelTest, KernelBehindAFinishedCopyIsNotStalled) {
  const StreamPoint copy = Copy(in_, Cost(kIn, kTenMb));
  Kernel(compute_, 2);
  time_.AddWait(compute_, copy);
  ExpectEnd(Kernel(compute_, 1), 3);
  EXPECT_EQ(time_.stats(0).stalled_on_copies_ms, 0);
}

TEST_F(TimeModelTest, StallIsTheTimeBetweenReadyAndTheEndOfTheCopy) {
  const StreamPoint copy = Copy(in_, Cost(kIn, 3 * kTenMb));
  Kernel(compute_, 1);
  time_.AddWait(compute_, copy);
  ExpectEnd(Kernel(compute_, 1), 4);
  EXPECT_NEAR(time_.stats(0).stalled_on_copies_ms, 2, kExact);
}

TEST_F(TimeModelTest, StallIsSeenThroughAChainOfWaits) {
  const int between = time_.AddStream(0, "emu:0/between");
  const StreamPoint copy = Copy(in_, Cost(kIn, kTenMb));
  const StreamPoint link = time_.AddWait(between, copy);
  time_.AddWait(compute_, link);
  RunToEnd(Kernel(compute_, 1));
  EXPECT_NEAR(time_.stats(0).stalled_on_copies_ms, 1, kExact);
}

TEST_F(TimeModelTest, CopyOnTheComputeStreamItselfIsAStall) {
  Copy(compute_, Cost(kOut, kTenMb));
  RunToEnd(Kernel(compute_, 1));
  EXPECT_NEAR(time_.stats(0).stalled_on_copies_ms, 2, kExact);
}

TEST_F(TimeModelTest, WaitingForAKernelOfAnotherStreamIsNoStall) {
  const int second = time_.AddStream(0, "emu:0/second");
  time_.AddWait(compute_, Kernel(second, 2));
  Copy(in_, Cost(kIn, kTenMb));
  RunToEnd(Kernel(compute_, 1));
  EXPECT_EQ(time_.stats(0).stalled_on_copies_ms, 0);
}

TEST_F(TimeModelTest, StreamWithoutKernelsIsNeverStalled) {
  const StreamPoint in = Copy(in_, Cost(kIn, kTenMb));
  time_.AddWait(out_, in);
  const StreamPoint out = Copy(out_, Cost(kOut, kTenMb));
  time_.Spend(3);  // the host does not wait
  EXPECT_TRUE(time_.Done(out));
  EXPECT_EQ(time_.stats(0).stalled_on_copies_ms, 0);
}

TEST_F(TimeModelTest, CopyThatTheHostBlocksOnBeforeItSubmitsMoreIsAStall) {
  for (int layer = 0; layer < 3; ++layer) {
    time_.AddWait(out_, Kernel(compute_, 1));
    RunToEnd(Copy(out_, Cost(kOut, kTenMb)));  // 2 ms
  }
  ExpectEnd(Kernel(compute_, 1), 10);
  EXPECT_NEAR(time_.stats(0).stalled_on_copies_ms, 6, kExact);
}

TEST_F(TimeModelTest, HostThatBlocksOnACopyIsNoStallWhileAKernelRuns) {
  Kernel(compute_, 1.5);
  ExpectEnd(Copy(out_, Cost(kOut, kTenMb)), 2);
  EXPECT_NEAR(time_.stats(0).stalled_on_copies_ms, 0.5, kExact);
}

TEST_F(TimeModelTest, StallOfAStreamDoesNotCountAgainForTheHost) {
  const StreamPoint copy = Copy(in_, Cost(kIn, 3 * kTenMb));
  time_.AddWait(compute_, copy);
  const StreamPoint kernel = Kernel(compute_, 1);
  EXPECT_EQ(time_.RunUntil(copy, 1), Outcome::kTimeout);  // the host waits for the copy itself
  RunToEnd(kernel);                                       // and for the stream behind it
  EXPECT_NEAR(time_.now_ms(), 4, kExact);
  EXPECT_NEAR(time_.stats(0).stalled_on_copies_ms, 3, kExact);
}

TEST_F(TwoDevicesTest, HostThatBlocksOnACopyStallsTheDeviceOfTheCopy) {
  RunToEnd(Copy(in1_, Cost(kIn, kTenMb, 1)));
  EXPECT_EQ(time_.stats(0).stalled_on_copies_ms, 0);
  EXPECT_NEAR(time_.stats(1).stalled_on_copies_ms, 1, kExact);
}

TEST_F(TwoDevicesTest, HostThatBlocksOnACopyIsNotStalledByTheOneBehindIt) {
  const StreamPoint first = Copy(in_, Cost(kIn, kTenMb, 0));
  Copy(in_, Cost(kIn, kTenMb, 1));
  RunToEnd(first);
  EXPECT_NEAR(time_.stats(0).stalled_on_copies_ms, 1, kExact);
  EXPECT_EQ(time_.stats(1).stalled_on_copies_ms, 0);
}

TEST_F(TwoDevicesTest, AStallOfOneDeviceDoesNotHideTheHostsOnAnother) {
  const int compute1 = time_.AddStream(1, "emu:1/compute");
  time_.AddWait(compute1, Copy(in1_, Cost(kIn, 4'000'000, 1)));
  Kernel(compute1, 1);
  RunToEnd(Copy(in_, Cost(kIn, 8'000'000, 0)));  // concurrent at 6 GB/s, then alone at 10
  EXPECT_NEAR(time_.stats(0).stalled_on_copies_ms, time_.now_ms(), kExact);
  EXPECT_NEAR(time_.stats(1).stalled_on_copies_ms, 4.0 / 6, kExact);
}

TEST_F(TimeModelTest, AHostThatBlocksNoMoreIsNotStalled) {
  RunToEnd(Copy(in_, Cost(kIn, kTenMb)));
  Copy(in_, Cost(kIn, kTenMb));
  time_.Spend(1);
  EXPECT_NEAR(time_.stats(0).stalled_on_copies_ms, 1, kExact) << "of the first copy";
}

TEST_F(TwoDevicesTest, KernelBehindACopyOfAnotherDeviceStallsItsOwnDeviceAlone) {
  const int compute1 = time_.AddStream(1, "emu:1/compute");
  time_.AddWait(compute1, Copy(in_, Cost(kIn, kTenMb, 0)));
  RunToEnd(Kernel(compute1, 1));
  EXPECT_EQ(time_.stats(0).stalled_on_copies_ms, 0);
  EXPECT_NEAR(time_.stats(1).stalled_on_copies_ms, 1, kExact);
}

TEST_F(TimeModelTest, PrefetchedLayersHideBehindComputeExceptTheFirst) {
  // Each of ten layers needs a copy of 1 ms and computes for 2 ms; copies run ahead.
  StreamPoint last;
  for (int layer = 0; layer < 10; ++layer) {
    time_.AddWait(compute_, Copy(in_, Cost(kIn, kTenMb)));
    last = Kernel(compute_, 2);
  }
  ExpectEnd(last, 21);
  EXPECT_NEAR(time_.stats(0).stalled_on_copies_ms, 1, kExact);
}

}  // namespace
}  // namespace pinion
