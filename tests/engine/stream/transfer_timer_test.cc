// Virtual time makes all measured times exact.

#include "pinion/engine/stream/transfer_timer.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/device/trace/trace_sink.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/engine/stats/engine_stats.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/tests/engine/engine_world.h"
#include "pinion/tests/engine/faulty_world.h"
#include "pinion/tests/support/forwarding_device.h"
#include "pinion/tests/support/recording_trace_sink.h"
#include "pinion/tests/support/run_threads.h"
#include "pinion/tests/support/status_matchers.h"
#include "pinion/tests/support/test_waits.h"

namespace pinion::testing {
namespace transfer_timer_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr absl::Duration kLong = absl::Hours(1);  // of virtual time
constexpr double kExactMs = 1e-9;

EngineOptions Timed(std::shared_ptr<TraceSink> trace = nullptr) {
  EngineOptions options;
  options.time_transfers = true;
  options.trace = std::move(trace);
  return options;
}

// Launches work that accesses no memory.
void Compute(EngineWorld& world, double ms, StreamHandle stream) {
  const auto kernel_ms = [&](double flops) {
    return KernelMs(world.machine().options().preset, flops, 0, ComputeType::kFloat32);
  };
  constexpr double kFlops = 1e15;
  Kernel kernel;
  kernel.name = "work";
  kernel.flops = kFlops * (ms - kernel_ms(0)) / (kernel_ms(kFlops) - kernel_ms(0));
  ASSERT_THAT(world.machine().PrepareKernel(0, stream), IsOk());
  ASSERT_THAT(world.machine().Launch(0, stream, kernel), IsOk());
}

double CopyMs(EngineWorld& world, CopyDirection direction, uint64_t size_bytes) {
  const LinkModel& link = world.machine().options().preset.link;
  const double gb_per_s =
      direction == CopyDirection::kHostToDevice ? link.h2d_gb_per_s : link.d2h_gb_per_s;
  return link.fixed_us * 1e-3 + static_cast<double>(size_bytes) / (gb_per_s * 1e6);
}

EngineStats DrainedStats(EngineWorld& world) {
  EXPECT_THAT(world.engine().Drain(kLong), IsOk());
  EXPECT_THAT(world.machine().SynchronizeDevice(0), IsOk());
  world.engine().Poll();
  return world.engine().GetStats();
}

TEST(TransferTimerTest, CopyTimesAreTheLinksOwn) {
  EngineWorld world(TestMachineOptions(), Timed());
  uint8_t* const data = world.AllocateDevice(8 * kMiB);
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(8 * kMiB);
  // Keeps the stream busy: an idle one would wait for the host's next call within the timed copy.
  Compute(world, 1, world.compute());
  world.CopyOut(host, data);
  world.CopyIn(host, data);  // after the copy out, so they share nothing
  world.engine().Poll();
  EXPECT_EQ(world.engine().GetStats().d2h.copy_time.count, 0) << "it is not done";

  const EngineStats stats = DrainedStats(world);
  EXPECT_EQ(stats.d2h.copy_time.count, 1);
  EXPECT_NEAR(stats.d2h.copy_time.total_ms, CopyMs(world, CopyDirection::kDeviceToHost, 8 * kMiB),
              kExactMs);
  EXPECT_EQ(stats.h2d.copy_time.count, 1);
  EXPECT_NEAR(stats.h2d.copy_time.max_ms, CopyMs(world, CopyDirection::kHostToDevice, 8 * kMiB),
              kExactMs);
  EXPECT_EQ(stats.h2d.untimed + stats.d2h.untimed, 0);
  EXPECT_THAT(stats.ToString(), HasSubstr("copies 1 x"));
}

TEST(TransferTimerTest, AfterADrainEveryCopyIsTimed) {
  EngineWorld world(TestMachineOptions(), Timed());
  world.CopyIn(kMiB);
  ASSERT_THAT(world.engine().Drain(kLong), IsOk());
  EXPECT_EQ(world.engine().GetStats().h2d.copy_time.count, 1);
}

TEST(TransferTimerTest, StallsAddUpToWhatTheMachineSawStalled) {
  EngineWorld world(TestMachineOptions(), Timed());
  uint8_t* const data = world.AllocateDevice(32 * kMiB);
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(32 * kMiB);
  const StreamHandle other = world.NewStream();
  const double copy_ms = CopyMs(world, CopyDirection::kHostToDevice, 32 * kMiB);

  // Compute shorter than a copy, longer, and much shorter. Only the second one hides the copy.
  world.machine().ResetTimeStats(0);
  double expected_ms = 0;
  for (const double compute_ms : {0.75 * copy_ms, 1.5 * copy_ms, 0.25 * copy_ms}) {
    Compute(world, compute_ms, world.compute());
    const Transfer in = world.CopyIn(host, data, other);
    ASSERT_THAT(in.WaitOn(world.compute(), kReadAfterCopyIn), IsOk());
    Compute(world, 0.01, world.compute());
    ASSERT_THAT(world.machine().SynchronizeDevice(0), IsOk());
    expected_ms += std::max(0.0, copy_ms - compute_ms);
  }

  const double machine_ms = world.machine().time_stats(0).stalled_on_copies_ms;
  const DurationSummary stalls = DrainedStats(world).h2d.stall_time;
  EXPECT_EQ(stalls.count, 3);
  EXPECT_NEAR(stalls.total_ms, machine_ms, kExactMs);
  // Differs by the host's time for submitting the copy.
  EXPECT_NEAR(stalls.total_ms, expected_ms, 0.1);
  EXPECT_GT(stalls.total_ms, copy_ms);
}

TEST(TransferTimerTest, AWaitForWhatIsDoneStallsForNoLongerThanItsOwnCalls) {
  EngineWorld world(TestMachineOptions(), Timed());
  const Transfer out = world.CopyOut(kMiB);
  ASSERT_THAT(world.machine().SynchronizeDevice(0), IsOk());  // the engine does not know
  ASSERT_THAT(out.WaitOn(world.compute(), kReuseAfterCopyOut), IsOk());
  ASSERT_THAT(world.engine().Drain(kLong), IsOk());
  // The engine knows that the copy is done, so it enqueues and times no wait.
  ASSERT_THAT(out.WaitOn(world.compute(), kReuseAfterCopyOut), IsOk());

  const DurationSummary stalls = DrainedStats(world).d2h.stall_time;
  EXPECT_EQ(stalls.count, 1);
  EXPECT_LE(stalls.max_ms, 3 * TestMachineOptions().preset.host_event_us * 1e-3 + kExactMs);
}

TEST(TransferTimerTest, EachChunkOfALargeTransferIsTimed) {
  auto sink = std::make_shared<RecordingTraceSink>();
  EngineWorld world(TestMachineOptions(), Chunks(kMiB, Timed(sink)));
  uint8_t* const data = world.AllocateDevice(8 * kMiB);
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(8 * kMiB);
  Compute(world, 1, world.compute());
  world.CopyOut(host, data);

  const DirectionStats stats = DrainedStats(world).d2h;
  EXPECT_EQ(stats.submitted_chunks, 8);
  EXPECT_EQ(stats.copy_time.count, 8);
  EXPECT_NEAR(stats.copy_time.max_ms, CopyMs(world, CopyDirection::kDeviceToHost, kMiB), kExactMs);
  ASSERT_EQ(sink->transfers().size(), 8);
  for (size_t i = 1; i < 8; ++i) {
    EXPECT_GE(sink->transfers()[i].start_ms, sink->transfers()[i - 1].end_ms - 1e-6);
    EXPECT_EQ(sink->transfers()[i].number, i + 1);
  }
}

TEST(TransferTimerTest, TheSinkIsToldWhatWasCopiedAndWhoWaited) {
  auto sink = std::make_shared<RecordingTraceSink>();
  EngineOptions options;
  options.trace = sink;
  const double created_ms = SteadyClockMs();
  EngineWorld world(TestMachineOptions(), options);
  uint8_t* const data = world.AllocateDevice(Pattern(1, 4 * kMiB));
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(4 * kMiB);
  const double before_ms = SteadyClockMs();
  const Transfer out = world.CopyOut(host, data);
  ASSERT_THAT(out.WaitOn(world.compute(), kReuseAfterCopyOut), IsOk());
  const Transfer in = world.CopyIn(host, data);
  ASSERT_THAT(in.WaitOn(world.compute(), kReadAfterCopyIn), IsOk());
  const double after_ms = SteadyClockMs();
  DrainedStats(world);

  ASSERT_EQ(sink->transfers().size(), 2);
  const bool out_first = sink->transfers()[0].direction == CopyDirection::kDeviceToHost;
  const TransferRecord copy_out = sink->transfers()[out_first ? 0 : 1];
  const TransferRecord copy_in = sink->transfers()[out_first ? 1 : 0];
  EXPECT_EQ(copy_in.device, "emu:0");
  EXPECT_EQ(copy_in.number, in.ticket().value);
  EXPECT_EQ(copy_in.size_bytes, 4 * kMiB);
  EXPECT_EQ(copy_in.pieces, 1);
  EXPECT_GE(copy_in.submitted_ms, before_ms);
  EXPECT_LE(copy_in.submitted_ms, after_ms);
  EXPECT_GE(copy_in.start_ms, copy_out.end_ms - 1e-6) << "one clock for both directions";
  EXPECT_GE(copy_out.start_ms, created_ms) << "and that of everything else";
  EXPECT_NEAR(copy_in.end_ms - copy_in.start_ms,
              CopyMs(world, CopyDirection::kHostToDevice, 4 * kMiB), 1e-6);

  ASSERT_EQ(sink->stalls().size(), 2);
  EXPECT_EQ(sink->stalls()[0].direction, CopyDirection::kDeviceToHost);
  EXPECT_EQ(sink->stalls()[0].transfer_number, out.ticket().value);
  EXPECT_STREQ(sink->stalls()[0].wait_site, "kReuseAfterCopyOut");
  const StallRecord stall = sink->stalls()[1];
  EXPECT_EQ(stall.direction, CopyDirection::kHostToDevice);
  EXPECT_EQ(stall.device, "emu:0");
  EXPECT_EQ(stall.stream, world.compute());
  EXPECT_STREQ(stall.wait_site, "kReadAfterCopyIn");
  EXPECT_EQ(stall.transfer_number, copy_in.number);
  EXPECT_NEAR(stall.end_ms, copy_in.end_ms, 1e-6);

  const std::vector<RecordingTraceSink::Range> submits = sink->RangesNamed("pinion.submit");
  ASSERT_EQ(submits.size(), 2);
  EXPECT_EQ(submits[0].size_bytes, 4 * kMiB);
  EXPECT_EQ(sink->open_ranges(), 0);
}

// Results of a program that copies in both directions.
struct Outcome {
  std::vector<uint8_t> bytes;
  double now_ms = 0;
  std::map<std::string, int> calls;
};

Outcome RunProgram(const EngineOptions& options) {
  Outcome outcome;
  std::shared_ptr<EmulatedMachine> machine = *EmulatedMachine::Create(TestMachineOptions());
  auto device = std::make_shared<ForwardingDevice>(machine->device(0));
  device->FailCalls([&](const std::string& call, uint64_t) {
    ++outcome.calls[call];
    return absl::OkStatus();
  });
  EngineWorld world(machine, device, options);
  uint8_t* const data = world.AllocateDevice(64 * kKiB);
  for (int step = 0; step < 20; ++step) {
    const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(64 * kKiB);
    world.WriteDevice(data, Pattern(step, 64 * kKiB));
    const Transfer out = world.CopyOut(host, data);
    EXPECT_THAT(out.WaitOn(world.compute(), kReuseAfterCopyOut), IsOk());
    world.WriteDevice(data, Pattern(99, 64 * kKiB));
    const Transfer in = world.CopyIn(host, data);
    EXPECT_THAT(in.WaitOn(world.compute(), kReadAfterCopyIn), IsOk());
  }
  EXPECT_THAT(machine->SynchronizeDevice(0), IsOk());
  outcome.now_ms = machine->now_ms();
  outcome.bytes = world.ReadDevice(data, 64 * kKiB);
  EXPECT_THAT(machine->races(), ::testing::IsEmpty());
  return outcome;
}

TEST(TransferTimerTest, TimingChangesNoByteAndCostsTheHostItsCallsOnly) {
  const Outcome off = RunProgram({});
  const Outcome on = RunProgram(Timed());
  EXPECT_EQ(on.bytes, off.bytes);
  EXPECT_EQ(off.calls.count("CreateTimedEvent") + off.calls.count("ElapsedMs"), 0);
  EXPECT_GT(on.calls.at("ElapsedMs"), 0);
  EXPECT_LE(on.calls.at("CreateTimedEvent"), 60) << "events are used again";

  int more_calls = 0;
  for (const auto& [call, count] : on.calls) {
    const auto found = off.calls.find(call);
    more_calls += count - (found == off.calls.end() ? 0 : found->second);
  }
  const double call_ms = TestMachineOptions().preset.host_event_us * 1e-3;
  EXPECT_NEAR(on.now_ms, off.now_ms, more_calls * call_ms);
}

TEST(TransferTimerTest, ASinkThatWantsRangesOnlySparesTheEvents) {
  auto sink = std::make_shared<RecordingTraceSink>(/*wants_transfers=*/false);
  EngineOptions options;
  options.trace = sink;
  EXPECT_EQ(RunProgram(options).calls.count("CreateTimedEvent"), 0);
  EXPECT_EQ(sink->RangesNamed("pinion.submit").size(), 40);
}

// One of the calls that timing adds fails permanently.
class BrokenTimingTest : public ::testing::TestWithParam<const char*> {};

TEST_P(BrokenTimingTest, TransfersGoOnAndAreCountedAsNotTimed) {
  FaultyWorld world(Timed());
  world.FailAll(GetParam(), absl::InvalidArgumentError("injected"));
  uint8_t* const data = world.AllocateDevice(Pattern(1, kMiB));
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(kMiB);
  const Transfer out = world.CopyOut(host, data);
  EXPECT_THAT(out.WaitOn(world.compute(), kReuseAfterCopyOut), IsOk());
  const EngineStats stats = DrainedStats(world);
  EXPECT_EQ(stats.d2h.completed_transfers, 1);
  EXPECT_EQ(stats.d2h.copy_time.count + stats.d2h.stall_time.count, 0);
  EXPECT_EQ(stats.d2h.untimed, 2);
  EXPECT_EQ(world.ReadHost(*host), Pattern(1, kMiB));
  EXPECT_THAT(world.machine().races(), ::testing::IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(Calls, BrokenTimingTest,
                         ::testing::Values("CreateTimedEvent", "ElapsedMs", "QueryEvent"));

// Only this call fails.
TEST(TransferTimerTest, AMomentThatWasNotRecordedOrReadIsCountedAndTheNextIsTimed) {
  struct Fault {
    const char* call;
    int number;
  };
  for (const Fault& fault : {Fault{"CreateTimedEvent", 1}, Fault{"CreateTimedEvent", 2},
                             Fault{"ElapsedMs", 1}, Fault{"ElapsedMs", 2}}) {
    SCOPED_TRACE(std::string(fault.call) + " " + std::to_string(fault.number));
    FaultyWorld world(Timed());
    world.FailCall(fault.call, fault.number, absl::InvalidArgumentError("injected"));
    for (int i = 0; i < 2; ++i) {
      world.CopyIn(kMiB);
      ASSERT_THAT(world.engine().Drain(kLong), IsOk());
    }
    EXPECT_EQ(world.engine().GetStats().h2d.untimed, 1);
    EXPECT_EQ(world.engine().GetStats().h2d.copy_time.count, 1);
  }
}

// A recycled event still holds the record of another moment.
class TimedRecordsFail : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  bool fail = false;
  absl::StatusOr<EventHandle> CreateTimedEvent() override {
    absl::StatusOr<EventHandle> event = ForwardingDevice::CreateTimedEvent();
    if (event.ok()) timed_.insert(event->native());
    return event;
  }
  absl::Status RecordEvent(EventHandle event, StreamHandle stream) override {
    if (fail && timed_.count(event.native()) > 0) return absl::InvalidArgumentError("injected");
    return ForwardingDevice::RecordEvent(event, stream);
  }

 private:
  std::set<void*> timed_;
};

TEST(TransferTimerTest, AnEventThatCouldNotBeRecordedAgainIsNotRead) {
  std::shared_ptr<EmulatedMachine> machine = *EmulatedMachine::Create(TestMachineOptions());
  auto device = std::make_shared<TimedRecordsFail>(machine->device(0));
  EngineWorld world(machine, device, Timed());
  for (const bool fail : {false, true}) {
    device->fail = fail;
    world.CopyIn(kMiB);
    ASSERT_THAT(world.engine().Drain(kLong), IsOk());
  }
  EXPECT_EQ(world.engine().GetStats().h2d.untimed, 1);
  EXPECT_EQ(world.engine().GetStats().h2d.copy_time.count, 1);
}

TEST(TransferTimerTest, ADeviceThatFailedIsNotAskedForTimes) {
  FaultyWorld world(Timed());
  world.CopyIn(kMiB);
  world.FailAll("QueryEvent", DeviceLost());
  for (int i = 0; i < 2; ++i) world.engine().Poll();
  EXPECT_EQ(world.engine().GetStats().h2d.untimed, 0);
}

TEST(TransferTimerTest, AnEngineThatCannotTellTheTimeIsNotMade) {
  for (const char* fails : {"CreateTimedEvent", "RecordEvent", "WaitEvent"}) {
    std::shared_ptr<EmulatedMachine> machine = *EmulatedMachine::Create(TestMachineOptions());
    auto device = std::make_shared<ForwardingDevice>(machine->device(0));
    device->FailCalls([fails](const std::string& call, uint64_t) {
      return call == fails ? absl::InvalidArgumentError("injected") : absl::OkStatus();
    });
    EXPECT_THAT(TransferEngine::Create(Timed(), device),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("injected")))
        << fails;
    EXPECT_EQ(device->live_streams(), 0) << fails;
  }
}

TEST(TransferTimerTest, CopiesInThatAreStuckDoNotHoldBackTheTimesOfCopiesOut) {
  EngineWorld world(TestMachineOptions(), Timed());
  uint8_t* const data = world.AllocateDevice(2 * kMiB);
  const StreamHandle busy = world.NewStream();
  Compute(world, 1000, busy);
  world.CopyIn(world.NewHostBuffer(kMiB), data, busy);
  const Transfer out = world.CopyOut(world.NewHostBuffer(kMiB), data + kMiB);
  ASSERT_THAT(out.Wait(kLong), IsOk());
  world.engine().Poll();
  EXPECT_EQ(world.engine().GetStats().d2h.copy_time.count, 1);
  EXPECT_EQ(world.engine().GetStats().h2d.copy_time.count, 0);
}

TEST(TransferTimerTest, SubmitCollectsTimesOnceManyAreDue) {
  EngineWorld world(TestMachineOptions(), Timed());
  uint8_t* const data = world.AllocateDevice(64);
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(64);
  for (int i = 0; i < 17; ++i) {
    EXPECT_EQ(world.engine().GetStats().h2d.copy_time.count, 0) << i;
    world.CopyIn(host, data);
    ASSERT_THAT(world.machine().SynchronizeDevice(0), IsOk());
  }
  EXPECT_GE(world.engine().GetStats().h2d.copy_time.count, 16);
}

// Rounds as cudaEventElapsedTime does: floats with a resolution of half a microsecond.
class RoundingDevice : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  absl::StatusOr<double> ElapsedMs(EventHandle start, EventHandle end) override {
    const absl::StatusOr<double> exact = ForwardingDevice::ElapsedMs(start, end);
    if (!exact.ok()) return exact;
    return static_cast<float>(std::floor(*exact * 2e3) / 2e3);
  }
};

// Returns when each of many short copies began, relative to the first.
template <typename AnyDevice>
std::vector<double> BeginningsMs() {
  auto sink = std::make_shared<RecordingTraceSink>();
  std::shared_ptr<EmulatedMachine> machine = *EmulatedMachine::Create(TestMachineOptions());
  EngineWorld world(machine, std::make_shared<AnyDevice>(machine->device(0)), Timed(sink));
  uint8_t* const data = world.AllocateDevice(kMiB);
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(kMiB);
  for (int i = 0; i < 200; ++i) world.CopyIn(host, data);
  DrainedStats(world);
  std::vector<double> beginnings_ms;
  for (const TransferRecord& transfer : sink->transfers()) {
    beginnings_ms.push_back(transfer.start_ms - sink->transfers().front().start_ms);
  }
  return beginnings_ms;
}

TEST(TransferTimerTest, RoundingDoesNotAddUpOverShortCopies) {
  const std::vector<double> exact_ms = BeginningsMs<ForwardingDevice>();
  const std::vector<double> rounded_ms = BeginningsMs<RoundingDevice>();
  ASSERT_EQ(rounded_ms.size(), 200);
  for (size_t i = 0; i < rounded_ms.size(); ++i) {
    ASSERT_NEAR(rounded_ms[i], exact_ms[i], 2e-3) << i;
  }
}

TEST(TransferTimerTest, TimesStayExactInALongRun) {
  auto sink = std::make_shared<RecordingTraceSink>();
  std::shared_ptr<EmulatedMachine> machine = *EmulatedMachine::Create(TestMachineOptions());
  auto device = std::make_shared<RoundingDevice>(machine->device(0));
  EngineWorld world(machine, device, Timed(sink));
  uint8_t* const data = world.AllocateDevice(kMiB);
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(kMiB);
  constexpr int kCopies = 200;
  constexpr double kComputeMs = 5000;  // 1e6 ms in total, where floats are 0.06 ms apart
  for (int i = 0; i < kCopies; ++i) {
    Compute(world, kComputeMs, world.compute());
    const Transfer in = world.CopyIn(host, data);
    ASSERT_THAT(in.WaitOn(world.compute(), kReadAfterCopyIn), IsOk());
    if (i % 8 == 0) {
      ASSERT_THAT(world.engine().Drain(kLong), IsOk());
    }
  }
  DrainedStats(world);
  const std::vector<TransferRecord> transfers = sink->transfers();
  ASSERT_EQ(transfers.size(), kCopies);
  const double copy_ms = CopyMs(world, CopyDirection::kHostToDevice, kMiB);
  for (int i = 1; i < kCopies; ++i) {
    // Between two drains the host's calls take virtual time too.
    if (i % 8 == 1) continue;
    ASSERT_NEAR(transfers[i].start_ms - transfers[i - 1].start_ms, kComputeMs + copy_ms, 1e-3) << i;
  }
}

TEST(TransferTimerTest, AStreamThatIsStuckCostsBoundedMemory) {
  EngineWorld world(TestMachineOptions(), Timed());
  const StreamHandle stuck = world.NewStream();
  Compute(world, 1000, stuck);
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(kMiB);
  uint8_t* const data = world.AllocateDevice(kMiB);
  const Transfer in = world.CopyIn(host, data, stuck);
  constexpr uint64_t kWaits = 5000;
  for (uint64_t i = 0; i < kWaits; ++i) {
    ASSERT_THAT(in.WaitOn(world.compute(), kReadAfterCopyIn), IsOk());
  }
  EXPECT_EQ(world.engine().GetStats().h2d.untimed, kWaits - 4096);
  EXPECT_EQ(DrainedStats(world).h2d.stall_time.count, 4096);
}

// A second thread polls while the first one is collecting a measurement.
TEST(TransferTimerTest, OfTwoThreadsThatPollAtOnceOneCollects) {
  auto sink = std::make_shared<RecordingTraceSink>();
  FaultyWorld world(Timed(sink));
  const StreamHandle busy = world.NewStream();
  uint8_t* const data = world.AllocateDevice(kMiB);
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(kMiB);
  const Transfer first = world.CopyIn(host, data);
  ASSERT_THAT(world.machine().SynchronizeDevice(0), IsOk());
  Compute(world, 1000, busy);
  const Transfer second = world.CopyIn(host, data, busy);
  bool acted = false;
  world.DuringCall("ElapsedMs", 1, [&] {
    acted = true;
    std::thread([&] { world.engine().Poll(); }).join();
  });
  world.engine().Poll();
  EXPECT_TRUE(acted);
  ASSERT_THAT(second.Wait(kLong), IsOk());
  world.engine().Poll();
  std::vector<uint64_t> numbers;
  for (const TransferRecord& transfer : sink->transfers()) numbers.push_back(transfer.number);
  EXPECT_THAT(numbers, ElementsAre(1, 2));
}

TEST(TransferTimerTest, ThreadsThatSubmitWaitAndPollLoseNoMeasurement) {
  auto sink = std::make_shared<RecordingTraceSink>();
  EngineWorld world(TestMachineOptions(), Timed(sink));
  constexpr int kThreads = 4;
  constexpr int kRounds = 100;
  std::vector<StreamHandle> streams;
  for (int i = 0; i < kThreads; ++i) streams.push_back(world.NewStream());
  RunThreads(kThreads, [&](int thread) {
    const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(4 * kKiB);
    PINION_ASSERT_OK_AND_ASSIGN(void* const data,
                                world.machine().device(0)->Allocate(4 * kKiB, streams[thread]));
    for (int round = 0; round < kRounds; ++round) {
      const Transfer in = world.CopyIn(host, data, streams[thread]);
      ASSERT_THAT(in.WaitOn(streams[thread], kReadAfterCopyIn), IsOk());
      if (round % 7 == thread) world.engine().Poll();
    }
  });
  const DirectionStats stats = DrainedStats(world).h2d;
  EXPECT_EQ(stats.copy_time.count, kThreads * kRounds);
  EXPECT_EQ(stats.untimed, 0);
  EXPECT_EQ(sink->transfers().size(), kThreads * kRounds);
  EXPECT_EQ(sink->stalls().size(), stats.stall_time.count);
  EXPECT_EQ(sink->open_ranges(), 0);
}

}  // namespace transfer_timer_test
}  // namespace pinion::testing
