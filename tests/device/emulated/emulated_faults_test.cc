// Injected faults: failing calls, stuck copies, capturing streams.

#include <cstdint>
#include <limits>
#include <memory>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/device.h"
#include "pinion/device/device_backend.h"
#include "pinion/device/emulated/emulated_backend.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/device/emulated/faults.h"
#include "pinion/tests/device/emulated/emulated_fixture.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace {

using ::pinion::testing::IsOk;
using ::pinion::testing::IsOkAndHolds;
using ::pinion::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

class EmulatedFaultsTest : public EmulatedFixture {
 protected:
  void StartWith(const FaultPlan& faults) {
    EmulatedOptions options = Options();
    options.faults = faults;
    Start(options);
  }
};

TEST(IsStickyTest, InternalAloneSaysThatEveryLaterCallFails) {
  EXPECT_TRUE(IsSticky(absl::InternalError("message")));
  for (const absl::StatusCode code :
       {absl::StatusCode::kOk, absl::StatusCode::kResourceExhausted, absl::StatusCode::kUnavailable,
        absl::StatusCode::kDeadlineExceeded, absl::StatusCode::kInvalidArgument,
        absl::StatusCode::kFailedPrecondition}) {
    EXPECT_FALSE(IsSticky(absl::Status(code, "message"))) << code;
  }
}

TEST_F(EmulatedFaultsTest, TransientFaultFailsOneCallAndDoesNothing) {
  StartWith({.calls = {{DeviceCall::kCopy, 2}}});
  const auto [data, host] = MakeBuffers(kKiB);
  host[0] = 1;
  ASSERT_THAT(ToDevice(data, host, kKiB, compute_), IsOk());
  Synchronize(compute_);
  host[0] = 2;
  EXPECT_THAT(ToDevice(data, host, kKiB, compute_),
              StatusIs(absl::StatusCode::kUnavailable,
                       AllOf(HasSubstr("Copy call 2"), HasSubstr("transient"))));
  Synchronize(compute_);
  EXPECT_EQ(data[0], 1);
  EXPECT_THAT(ToDevice(data, host, kKiB, compute_), IsOk());
}

TEST_F(EmulatedFaultsTest, StickyFaultFailsEveryLaterCallOfItsDeviceWithTheFirstError) {
  EmulatedOptions options = TwoDevices();
  options.faults.calls = {{DeviceCall::kRecordEvent, 1, /*sticky=*/true}};
  Start(options);
  const EventHandle event = device_->CreateEvent().value();
  const auto sticky = StatusIs(absl::StatusCode::kInternal,
                               HasSubstr("RecordEvent call 1 failed (injected, sticky)"));
  EXPECT_THAT(device_->RecordEvent(event, compute_), sticky);
  EXPECT_THAT(device_->CreateStream("x"), sticky);
  EXPECT_THAT(device_->DestroyEvent(event), sticky);
  EXPECT_THAT(machine_->device(1)->CreateStream("x"), IsOk());
}

TEST_F(EmulatedFaultsTest, AnyCountsCallsOfEveryKind) {
  StartWith({.calls = {{DeviceCall::kAny, 5}}});  // the fixture creates two streams
  EXPECT_EQ(machine_->calls(DeviceCall::kAny), 2u);
  EXPECT_EQ(machine_->calls(DeviceCall::kCreateStream), 2u);
  EXPECT_THAT(device_->CreateEvent(), IsOk());
  EXPECT_THAT(device_->Allocate(kKiB, compute_), IsOk());
  EXPECT_THAT(device_->CreateEvent(), StatusIs(absl::StatusCode::kUnavailable));
  EXPECT_THAT(device_->CreateEvent(), IsOk());
}

TEST_F(EmulatedFaultsTest, KernelFailsBeforeItsOperatorRunsAndNeverAtItsLaunch) {
  StartWith({.calls = {{DeviceCall::kKernel, 2}}});
  uint8_t* const data = OnDevice(kKiB);
  Fill(data, 1, kKiB, compute_);
  EXPECT_THAT(machine_->PrepareKernel(0, compute_),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("Kernel call 2")));
  ASSERT_THAT(machine_->PrepareKernel(0, compute_), IsOk());
  Launch("fill", {}, {{data, kKiB}}, compute_);
  EXPECT_EQ(machine_->calls(DeviceCall::kKernel), 3u);
  Synchronize(compute_);
  EXPECT_EQ(machine_->time_stats(0).kernels, 2u);
}

TEST_F(EmulatedFaultsTest, WaitForAStuckCopyEndsAtOnceAndNamesIt) {
  // In PyTorch a single event that never completed kept 90 GB of pinned memory from being recycled,
  // and no message named it (pytorch#183501).
  StartWith({.calls = {}, .stall_copies_from = 2});
  uint8_t* const data = OnDevice(kKiB);
  uint8_t* const host = Pinned(2 * kKiB);
  Order(compute_, out_);
  ASSERT_THAT(ToHost(host, data, kKiB, out_), IsOk());
  const EventHandle first = Record(out_);
  ASSERT_THAT(ToHost(host + kKiB, data, kKiB, out_), IsOk());
  const EventHandle second = Record(out_);
  Order(out_, compute_);
  const EventHandle behind = Record(compute_);
  EXPECT_THAT(device_->WaitEvent(first, absl::InfiniteDuration()), IsOk());
  const auto stuck = AllOf(HasSubstr("copy D2H #"), HasSubstr("emu:0/d2h"), HasSubstr("stuck"));
  EXPECT_THAT(device_->WaitEvent(second, absl::InfiniteDuration()),
              StatusIs(absl::StatusCode::kDeadlineExceeded, stuck));
  const double before = machine_->now_ms();
  EXPECT_THAT(device_->WaitEvent(behind, absl::Seconds(30)),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       AllOf(stuck, HasSubstr("emu:0/default"), HasSubstr("30s"))));
  EXPECT_NEAR(machine_->now_ms() - before, 30'000, 1);
  EXPECT_THAT(device_->QueryEvent(second), IsOkAndHolds(false));
  EXPECT_THAT(device_->SynchronizeStream(out_), StatusIs(absl::StatusCode::kUnavailable, stuck));
  EXPECT_THAT(machine_->SynchronizeDevice(0), StatusIs(absl::StatusCode::kUnavailable, stuck));
  EXPECT_THAT(machine_->PrepareKernel(0, compute_),
              StatusIs(absl::StatusCode::kUnavailable, stuck));
}

TEST_F(EmulatedFaultsTest, MemoryThatAStuckCopyReadsIsNeitherPoisonedNorReusedNorUnpinned) {
  for (const bool recorded : {false, true}) {
    SCOPED_TRACE(recorded ? "its stream is recorded" : "the free waits for it");
    StartWith({.calls = {}, .stall_copies_from = 1});
    const auto [data, host] = MakeBuffers(kKiB);
    Fill(data, 1, kKiB, compute_);
    Order(compute_, out_);
    ASSERT_THAT(ToHost(host, data, kKiB, out_), IsOk());
    if (recorded) {
      ASSERT_THAT(machine_->RecordStream(data, out_), IsOk());
    } else {
      Order(out_, compute_);
    }
    ASSERT_THAT(Free(data), IsOk());
    EXPECT_EQ(data[0], 1);
    EXPECT_NE(OnDevice(kKiB), data);
    EXPECT_EQ(Memory().in_use_bytes, 2 * kKiB);
    EXPECT_THAT(source_->Free({host, 4 * kKiB, -1}),
                StatusIs(absl::StatusCode::kUnavailable, HasSubstr("stuck")));
    EXPECT_TRUE(machine_->IsPinned(host));
    EXPECT_EQ(host[0], 0) << "its bytes never move";
  }
}

TEST_F(EmulatedFaultsTest, AnAllocationThatNeedsMemoryBehindAStuckCopyIsRefusedAndNamesIt) {
  StartWith({.calls = {}, .stall_copies_from = 1});
  uint8_t* const data = OnDevice(40 * kMiB);
  uint8_t* const host = Pinned(kKiB);
  Order(compute_, out_);
  ASSERT_THAT(ToHost(host, data, kKiB, out_), IsOk());
  ASSERT_THAT(machine_->RecordStream(data, out_), IsOk());
  ASSERT_THAT(Free(data), IsOk());
  EXPECT_THAT(device_->Allocate(40 * kMiB, compute_),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       HasSubstr("freed, but recorded streams are not done 40 MiB")));
  EXPECT_THAT(device_->Allocate(20 * kMiB, compute_), IsOk());
}

TEST_F(EmulatedFaultsTest, CopyThatIsStuckForAWhileFinishesThen) {
  StartWith({.calls = {}, .stall_copies_from = 1, .stall_ms = 50});
  const auto [data, host] = MakeBuffers(kKiB);
  host[0] = 7;
  ASSERT_THAT(ToDevice(data, host, kKiB, compute_), IsOk());
  const EventHandle event = Record(compute_);
  EXPECT_THAT(device_->WaitEvent(event, absl::Milliseconds(10)),
              StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("still running")));
  EXPECT_THAT(device_->WaitEvent(event, absl::Milliseconds(100)), IsOk());
  EXPECT_NEAR(machine_->now_ms(), 50, 1);
  EXPECT_EQ(data[0], 7);
}

TEST_F(EmulatedFaultsTest, OneCopyIsStalledAndTheNextIsNot) {
  StartWith({.calls = {}, .stalls = {{.at = 2, .ms = 50}}});
  const auto [data, host] = MakeBuffers(kKiB);
  for (const double expected_ms : {0.0, 50.0, 0.0}) {
    const double before = machine_->now_ms();
    ASSERT_THAT(ToDevice(data, host, kKiB, compute_), IsOk());
    Synchronize(compute_);
    EXPECT_NEAR(machine_->now_ms() - before, expected_ms, 1);
  }
}

TEST_F(EmulatedFaultsTest, EventOfACapturingStreamCannotBePolled) {
  // In PyTorch the host allocator polled an event that a graph had captured (pytorch#193982).
  Start(Options());
  ASSERT_THAT(machine_->SetCapturing(compute_, true), IsOk());
  const StreamHandle later = device_->CreateStream("later").value();
  EXPECT_THAT(device_->IsCapturing(compute_), IsOkAndHolds(true));
  EXPECT_THAT(device_->IsCapturing(later), IsOkAndHolds(false));
  const EventHandle event = Record(compute_);
  ASSERT_THAT(machine_->SetCapturing(compute_, false), IsOk());
  EXPECT_THAT(device_->QueryEvent(event), StatusIs(absl::StatusCode::kFailedPrecondition));
  EXPECT_THAT(device_->WaitEvent(event, absl::InfiniteDuration()),
              StatusIs(absl::StatusCode::kFailedPrecondition));
  ASSERT_THAT(device_->RecordEvent(event, compute_), IsOk());
  EXPECT_THAT(device_->QueryEvent(event), IsOkAndHolds(true));
}

TEST_F(EmulatedFaultsTest, CapturedAndOtherWorkDoNotWaitForEachOther) {
  Start(Options());
  const EventHandle outside = Record(out_);
  ASSERT_THAT(machine_->SetCapturing(compute_, true), IsOk());
  const EventHandle captured = Record(compute_);
  EXPECT_THAT(device_->StreamWaitEvent(compute_, outside),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("outside")));
  EXPECT_THAT(device_->StreamWaitEvent(out_, captured),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("captured")));
  EXPECT_THAT(device_->StreamWaitEvent(compute_, captured), IsOk());
}

TEST_F(EmulatedFaultsTest, CallersBugsAreInvalidArguments) {
  Start(TwoDevices());
  const auto [data, host] = MakeBuffers(kKiB);
  const auto invalid = StatusIs(absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(ToHost(data, host, kKiB, compute_), invalid);  // wrong direction
  EXPECT_THAT(ToHost(host, data, 0, compute_), invalid);
  EXPECT_THAT(device_->CopyAsync(CopyDirection::kHostToDevice, {}, compute_), invalid);
  EXPECT_THAT(machine_->device(1)->SynchronizeStream(compute_),
              IsInvalid("emu:0/default was used with device emu:1: use it with emu:0"));
  EXPECT_THAT(device_->DestroyStream(compute_),
              IsInvalid("emu:0: the default stream is not yours: destroy the ones that"));
  EXPECT_THAT(machine_->HostAccess(data, 1, true), invalid);
  const EventHandle foreign = machine_->device(1)->CreateEvent().value();
  EXPECT_THAT(device_->RecordEvent(foreign, compute_),
              IsInvalid("event of emu:1 cannot be recorded on emu:0/default: record one of emu:0"));
}

using Change = void (*)(EmulatedOptions&);

void ExpectRefused(Change change, const char* message) {
  EmulatedOptions options;
  change(options);
  EXPECT_THAT(EmulatedMachine::Create(options), IsInvalid(message));
}

void ExpectValid(Change change) {
  EmulatedOptions options;
  change(options);
  EXPECT_THAT(options.Validate(), IsOk());
}

TEST_F(EmulatedFaultsTest, BadOptionsAreRefusedByName) {
  ExpectRefused([](EmulatedOptions& options) { options.device_count = 0; }, "device_count is 0");
  ExpectValid([](EmulatedOptions& options) { options.device_count = 64; });
  ExpectRefused([](EmulatedOptions& options) { options.device_count = 65; }, "device_count is 65");
  ExpectRefused([](EmulatedOptions& options) { options.memory_bytes = 0; }, "memory_bytes is 0");
  ExpectValid([](EmulatedOptions& options) { options.memory_bytes = 1; });
  ExpectValid([](EmulatedOptions& options) { options.memory_bytes = 1024 * kGiB; });
  ExpectRefused([](EmulatedOptions& options) { options.memory_bytes = 1024 * kGiB + 1; },
                "memory_bytes is 1099511627777");
  ExpectRefused([](EmulatedOptions& options) { options.preset.link.h2d_gb_per_s = 0; },
                "h2d_gb_per_s");
}

TEST_F(EmulatedFaultsTest, BadFaultPlansAreRefusedByFieldAndValue) {
  ExpectRefused(
      [](EmulatedOptions& options) {
        options.faults.calls = {{DeviceCall::kCopy, 1}, {DeviceCall::kPin, 0}};
      },
      "faults.calls[1].at is 0");
  ExpectRefused([](EmulatedOptions& options) { options.faults.stalls = {{.at = 0, .ms = 1}}; },
                "faults.stalls[0].at is 0");
  ExpectRefused([](EmulatedOptions& options) { options.faults.stalls = {{.at = 1, .ms = -2}}; },
                "faults.stalls[0].ms is -2");
  ExpectValid([](EmulatedOptions& options) { options.faults.stalls = {{.at = 1, .ms = 0}}; });
  ExpectValid([](EmulatedOptions& options) { options.faults.stall_ms = 0; });
  ExpectRefused([](EmulatedOptions& options) { options.faults.stall_ms = -2; },
                "faults.stall_ms is -2");
  ExpectRefused(
      [](EmulatedOptions& options) {
        options.faults.stall_ms = std::numeric_limits<double>::quiet_NaN();
      },
      "faults.stall_ms is nan");
}

TEST_F(EmulatedFaultsTest, BackendNamesTheDevicesItHas) {
  Start(TwoDevices());
  const DeviceBackend backend = EmulatedBackend(machine_);
  EXPECT_EQ(backend.type_name, "emu");
  EXPECT_EQ(backend.device(1).value()->name(), "emu:1");
  EXPECT_THAT(backend.device(2),
              StatusIs(absl::StatusCode::kNotFound, AllOf(HasSubstr("emu:2"), HasSubstr("has 2"))));
  EXPECT_THAT(backend.device(-1), StatusIs(absl::StatusCode::kNotFound, HasSubstr("emu:-1")));
}

TEST_F(EmulatedFaultsTest, DevicesAndPinnedSourcesKeepTheMachineAlive) {
  Start(Options());
  const HostSegment segment = source_->Allocate(4 * kKiB).value();
  machine_.reset();
  EXPECT_THAT(device_->CreateStream("late"), IsOk());
  device_.reset();
  EXPECT_THAT(source_->Free(segment), IsOk());
}

}  // namespace
}  // namespace pinion
