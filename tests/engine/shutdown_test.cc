// Shutdown with a deadline, and the messages of timeouts.

#include <chrono>
#include <cstdint>
#include <future>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/fence.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/engine/stats/engine_stats.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/tests/engine/engine_world.h"
#include "pinion/tests/engine/faulty_world.h"
#include "pinion/tests/support/captured_log.h"
#include "pinion/tests/support/forwarding_device.h"
#include "pinion/tests/support/status_matchers.h"
#include "pinion/tests/support/test_waits.h"

namespace pinion::testing {
namespace shutdown_test {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr absl::Duration kLong = absl::Seconds(30);

// Makes the at-th copy take `ms` longer, or forever.
EmulatedOptions WithStall(uint64_t at, double ms = std::numeric_limits<double>::infinity()) {
  EmulatedOptions options = TestMachineOptions();
  options.faults.stalls = {{.at = at, .ms = ms}};
  return options;
}

EngineOptions ShortPatience() {
  EngineOptions options;
  options.drain_timeout = absl::Seconds(5);
  return options;
}

auto TimesOut(const std::string& why) {
  return StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr(why));
}

// --- Messages of timeouts ---

TEST(TimeoutTest, NamesTheComputeStreamThatIsNotDone) {
  EngineWorld world(TestMachineOptions(), ShortPatience());
  world.Jam(world.compute());
  const Transfer out = world.CopyOut(kMiB);
  EXPECT_THAT(out.Wait(kLong),
              TimesOut("D2H on emu:0: after 30s submission 1 (1 MiB, 1 piece) is not done: it has "
                       "not started: it waits for the work that was on its compute stream when it "
                       "was submitted"));
}

TEST(TimeoutTest, NamesThePredecessorThatIsNotDone) {
  EngineWorld world(TestMachineOptions(), ShortPatience());
  const StreamHandle side = world.NewStream();
  uint8_t* const data = world.AllocateDevice(kMiB);
  ASSERT_THAT(world.engine().OrderStreams(world.compute(), side, kAfterOtherStream), IsOk());
  world.Jam(world.compute());
  world.CopyOut(world.NewHostBuffer(kKiB), data);
  const Transfer behind = world.CopyOut(world.NewHostBuffer(kMiB), data, side);
  EXPECT_THAT(behind.Wait(kLong),
              TimesOut("submission 2 (1 MiB, 1 piece) is not done: it waits for its predecessors, "
                       "and submission 1 (1 KiB, 1 piece) has not started"));
}

TEST(TimeoutTest, NamesACopyThatHasAllItNeedsAndIsStuck) {
  EngineWorld world(WithStall(1), ShortPatience());
  const Transfer in = world.CopyIn(kMiB);
  EXPECT_THAT(in.Wait(kLong),
              TimesOut("H2D on emu:0: after 30s submission 1 (1 MiB, 1 piece) is not done: it has "
                       "all that it waits for, but its copy has not finished"));
}

TEST(TimeoutTest, FollowsTheWaitToTheOtherDirection) {
  EngineWorld world(WithStall(1), ShortPatience());
  uint8_t* const data = world.AllocateDevice(2 * kMiB);
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(kMiB);
  world.WriteDevice(data, Pattern(1, kMiB));
  world.CopyOut(host, data);
  const Transfer in = world.CopyIn(host, data + kMiB);
  EXPECT_THAT(in.Wait(kLong),
              TimesOut("H2D on emu:0: after 30s submission 1 (1 MiB, 1 piece) is not done: it has "
                       "not started: it waits for D2H on emu:0, where submission 1 (1 MiB, 1 "
                       "piece) is not done: it has all that it waits for, but its copy"));
}

TEST(TimeoutTest, FollowsTheWaitToAnotherDevice) {
  EmulatedOptions machine = WithStall(1);
  machine.device_count = 2;
  EngineWorld world(machine, ShortPatience());
  uint8_t* const from = world.AllocateDevice(kMiB, 0);
  uint8_t* const to = world.AllocateDevice(kMiB, 1);
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(kMiB);
  world.CopyOut(host, from, world.compute(0), 0);
  const Transfer in = world.CopyIn(host, to, world.compute(1), 1);
  EXPECT_THAT(in.Wait(kLong), TimesOut("it waits for D2H on emu:0, where submission 1"));
}

// The copy out was in flight when the copy in was submitted, and has completed since.
TEST(TimeoutTest, DoesNotNameAWaitThatIsOver) {
  EngineWorld world(WithStall(2), ShortPatience());
  uint8_t* const data = world.AllocateDevice(2 * kMiB);
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(kMiB);
  world.CopyOut(host, data);
  const Transfer in = world.CopyIn(host, data + kMiB);
  EXPECT_THAT(in.Wait(kLong), TimesOut("is not done: it has all that it waits for, but its copy"));
}

TEST(TimeoutTest, SaysWhenTheCopyWasDoneAfterAll) {
  FaultyWorld world(ShortPatience());
  const Transfer in = world.CopyIn(kMiB);
  ASSERT_THAT(world.machine().SynchronizeDevice(0), IsOk());
  world.FailNext("WaitEvent", absl::DeadlineExceededError("just"));
  EXPECT_THAT(in.Wait(kLong), TimesOut("after 30s submission 1 is done by now (just)"));
}

TEST(TimeoutTest, NamesNoComputeStreamThatItCannotAsk) {
  FaultyWorld world(WithoutRetries());
  world.Jam(world.compute());
  const Transfer out = world.CopyOut(kMiB);
  world.FailAll("QueryEvent", absl::UnavailableError("busy"));
  EXPECT_THAT(out.Wait(kLong), TimesOut("its copy has not finished"));
}

TEST(TimeoutTest, NamesTheOtherDeviceThatHasFailed) {
  EmulatedOptions machine = TestMachineOptions();
  machine.device_count = 2;
  FaultyWorld world(ShortPatience(), machine);
  const std::shared_ptr<TransferEngine> healthy =
      TransferEngine::Create(ShortPatience(), world.machine().device(1)).value();
  uint8_t* const from = world.AllocateDevice(kMiB, 0);
  uint8_t* const to = world.AllocateDevice(kMiB, 1);
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(kMiB);
  world.Jam(world.compute());
  world.CopyOut(host, from, world.compute(0));
  CopyBatch batch(CopyDirection::kHostToDevice);
  batch.Add(host, 0, to, kMiB);
  PINION_ASSERT_OK_AND_ASSIGN(const Transfer in,
                              healthy->Submit(std::move(batch), world.compute(1)));
  world.FailNext("QueryEvent", DeviceLost());
  world.engine().Poll();
  EXPECT_THAT(in.Wait(kLong),
              TimesOut("it waits for D2H on emu:0, where submission 1 (1 MiB, 1 piece) is not "
                       "done: it was lost when the device failed"));
}

TEST(TimeoutTest, NamesTheStreamOfAMark) {
  EngineWorld world(TestMachineOptions(), ShortPatience());
  world.Jam(world.compute());
  PINION_ASSERT_OK_AND_ASSIGN(const FenceTicket mark, world.engine().Mark(world.compute()));
  EXPECT_THAT(mark.timeline->Wait(mark.value, kLong),
              TimesOut("a foreign stream on emu:0: after 30s mark 1 is not done: it waits for the "
                       "work before it on its stream"));
}

// --- Shutdown ---

TEST(ShutdownTest, DrainsAndThenRefusesWhatIsNew) {
  EngineWorld world;
  uint8_t* const data = world.AllocateDevice(kMiB);
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(kMiB);
  const Transfer in = world.CopyIn(host, data);

  ASSERT_THAT(world.engine().Shutdown(kLong), IsOk());

  EXPECT_TRUE(in.IsDone());
  const auto refused = StatusIs(absl::StatusCode::kFailedPrecondition,
                                AllOf(HasSubstr("emu:0"), HasSubstr("shut down")));
  EXPECT_THAT(world.TryCopyIn(host, data), refused);
  EXPECT_THAT(world.engine().Mark(world.compute()), refused);
  EXPECT_THAT(world.engine().OrderStreams(world.compute(), world.NewStream(), kAfterOtherStream),
              refused);
  EXPECT_THAT(world.engine().Calibrate(world.allocator()), refused);
  EXPECT_THAT(world.engine().health(), IsOk());
  EXPECT_THAT(world.engine().Shutdown(kLong), IsOk());
}

TEST(ShutdownTest, OfAStuckEngineEndsInTimeAndSaysWhy) {
  EngineWorld world(WithStall(1), ShortPatience());
  world.CopyIn(kMiB);
  const double before_ms = world.machine().now_ms();
  EXPECT_THAT(world.engine().Shutdown(kLong), TimesOut("its copy has not finished"));
  EXPECT_LT(world.machine().now_ms() - before_ms, 30'010);
}

// A driver with a full queue blocks the host in a call while the device stalls.
TEST(ShutdownTest, OfAStuckEngineWaitsForNoCallThatIsStuckToo) {
  FaultyWorld world(ShortPatience(), WithStall(1));
  uint8_t* const data = world.AllocateDevice(2 * kMiB);
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(kMiB);
  world.CopyIn(world.NewHostBuffer(kMiB), data);
  std::promise<void> blocked;
  std::promise<void> released;
  world.DuringCall("CopyAsync", 1, [&] {
    blocked.set_value();
    released.get_future().wait();
  });
  std::thread other([&] { EXPECT_THAT(world.TryCopyIn(host, data + kMiB), IsOk()); });
  blocked.get_future().wait();
  EXPECT_THAT(world.engine().Shutdown(kLong), TimesOut("its copy has not finished"));
  released.set_value();
  other.join();
}

TEST(ShutdownTest, WhatItLeftInFlightCanStillBeWaitedFor) {
  EngineWorld world(WithStall(1, /*ms=*/2'000), ShortPatience());
  uint8_t* const data = world.AllocateDevice(kMiB);
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(Pattern(1, kMiB));
  const Transfer in = world.CopyIn(host, data);
  EXPECT_THAT(world.engine().Shutdown(absl::Seconds(1)), TimesOut("submission 1"));
  EXPECT_THAT(in.WaitOn(world.compute(), kReadAfterCopyIn), IsOk());
  EXPECT_EQ(world.ReadDevice(data, kMiB), Pattern(1, kMiB));
  EXPECT_THAT(in.Wait(kLong), IsOk());
}

// The destructor must neither hang nor destroy a stream that still has work.
TEST(ShutdownTest, TheDestructorOfAStuckEngineEndsInTimeAndLeaks) {
  FaultyWorld world(ShortPatience(), WithStall(1));
  Transfer in = world.CopyIn(kMiB);
  const double before_ms = world.machine().now_ms();
  world.DestroyEngine();
  EXPECT_LT(world.machine().now_ms() - before_ms, 5'010);
  EXPECT_THAT(world.log.text(), AllOf(HasSubstr("destroyed with copies in flight"),
                                      HasSubstr("its copy has not finished")));
  EXPECT_FALSE(in.IsDone());
  EXPECT_EQ(world.device->live_streams(), 1);  // D2H's is destroyed
}

TEST(ShutdownTest, AStreamWithWorkOnItIsLeakedOnceNobodyHasItsTimeline) {
  const CapturedLog log;
  const std::shared_ptr<EmulatedMachine> machine = EmulatedMachine::Create(WithStall(1)).value();
  const auto device = std::make_shared<ForwardingDevice>(machine->device(0));
  {
    EngineWorld world(machine, device, ShortPatience());
    world.CopyIn(kMiB);
  }
  EXPECT_THAT(log.text(),
              HasSubstr("H2D on emu:0: leaked the stream, 1 submissions on it are not done"));
  EXPECT_EQ(device->live_streams(), 1);  // D2H's is destroyed
}

// Records the timeout of each wait, and makes each wait take real time.
class SlowWaits final : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;

  absl::Status WaitEvent(EventHandle event, absl::Duration timeout) override {
    timeouts_.push_back(timeout);
    absl::SleepFor(absl::Milliseconds(1));
    return ForwardingDevice::WaitEvent(event, timeout);
  }
  const std::vector<absl::Duration>& timeouts() const { return timeouts_; }

 private:
  std::vector<absl::Duration> timeouts_;
};

TEST(ShutdownTest, BothDirectionsShareTheTimeOfADrain) {
  const std::shared_ptr<EmulatedMachine> machine =
      EmulatedMachine::Create(TestMachineOptions()).value();
  const auto device = std::make_shared<SlowWaits>(machine->device(0));
  EngineWorld world(machine, device, {});
  world.CopyOut(kMiB);
  world.CopyIn(kMiB);
  ASSERT_THAT(world.engine().Drain(kLong), IsOk());
  ASSERT_EQ(device->timeouts().size(), 2u);
  EXPECT_LE(device->timeouts()[0], kLong);
  EXPECT_LT(device->timeouts()[1], device->timeouts()[0]);
}

// The submission starts before the shutdown and continues with its copy after it.
class ShutdownHalfWayTest : public ::testing::TestWithParam<bool> {};

TEST_P(ShutdownHalfWayTest, WaitsForASubmissionThatIsHalfWay) {
  const bool in = GetParam();
  FaultyWorld world;
  uint8_t* const data = world.AllocateDevice(kMiB);
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(kMiB);
  std::thread other;
  std::promise<void> ended;
  uint64_t completed_at_end = 0;
  world.DuringCall("CopyAsync", 1, [&] {
    other = std::thread([&] {
      EXPECT_THAT(world.engine().Shutdown(kLong), IsOk());
      const EngineStats stats = world.engine().GetStats();
      completed_at_end = (in ? stats.h2d : stats.d2h).completed_transfers;
      ended.set_value();
    });
    // Gives the other thread time; it must not finish.
    ended.get_future().wait_for(std::chrono::milliseconds(100));
  });
  EXPECT_THAT(in ? world.TryCopyIn(host, data) : world.TryCopyOut(host, data), IsOk());
  other.join();
  EXPECT_EQ(completed_at_end, 1u);
}

INSTANTIATE_TEST_SUITE_P(Directions, ShutdownHalfWayTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "In" : "Out"; });

TEST(ShutdownTest, WhatIsLeftOfABatchThatIsHalfWayIsRefused) {
  FaultyWorld world(Chunks(kMiB / 8));
  std::thread other;
  world.DuringCall("CopyAsync", 1, [&] {
    other = std::thread([&] { EXPECT_THAT(world.engine().Shutdown(kLong), IsOk()); });
    while (world.engine().Mark(world.compute()).ok()) absl::SleepFor(absl::Milliseconds(1));
  });
  EXPECT_THAT(world.TryCopyIn(kMiB),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("shut down")));
  other.join();
  EXPECT_EQ(world.engine().GetStats().h2d.submitted_chunks, 1u);
}

// A retried call inside a wait with a deadline; the device then fails permanently.
TEST(ShutdownTest, OfAPoisonedEngineReturnsTheFirstErrorAtOnce) {
  FaultyWorld world(ShortPatience(), WithStall(1));
  world.CopyIn(kMiB);
  int waits = 0;
  world.device->FailCalls([&waits](const std::string& call, uint64_t) -> absl::Status {
    if (call != "WaitEvent") return absl::OkStatus();
    return ++waits == 1 ? absl::UnavailableError("busy") : DeviceLost();
  });
  const double before_ms = world.machine().now_ms();
  EXPECT_THAT(world.engine().Shutdown(kLong),
              StatusIs(absl::StatusCode::kInternal,
                       AllOf(HasSubstr("WaitEvent"), HasSubstr("an ECC error"))));
  EXPECT_EQ(waits, 2);
  EXPECT_THAT(world.engine().Mark(world.compute()), IsDeviceLost());
  world.DestroyEngine();
  EXPECT_LT(world.machine().now_ms() - before_ms, 1);
}

}  // namespace shutdown_test
}  // namespace pinion::testing
