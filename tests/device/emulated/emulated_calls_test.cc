// Each call of the emulated device and machine: its count, host time and injected failure.

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/device/emulated/faults.h"
#include "pinion/tests/device/emulated/emulated_fixture.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace emulated_calls_test {

using ::pinion::testing::IsOk;
using ::pinion::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr uint64_t kPage = 4 * kKiB;
constexpr double kCallUs = 7, kEventUs = 5, kPinUs = 1024;  // for each pinned page

struct Call {
  const char* name;
  DeviceCall kind;  // kAny: is not counted and cannot be made to fail
  double cost_us;
  std::function<absl::Status()> make;
};

class EmulatedCallsTest : public EmulatedFixture {
 protected:
  EmulatedCallsTest() { StartWith({}); }

  void StartWith(const FaultPlan& faults) {
    EmulatedOptions options = Options();
    options.detect_races = false;
    options.preset.host_call_us = kCallUs;
    options.preset.host_event_us = kEventUs;
    options.preset.pin_ms_per_gib = kPinUs * 1e-3 * kGiB / kPage;
    options.preset.link.fixed_us = 0;
    options.faults = faults;
    Start(options);
    data_ = OnDevice(kPage);
    other_data_ = OnDevice(kPage);
    host_ = Pinned(kPage);
    segment_ = Pinned(2 * kPage);
    event_ = device_->CreateEvent().value();
    for (EventHandle* const timed : {&start_, &end_}) {
      *timed = device_->CreateTimedEvent().value();
      EXPECT_THAT(device_->RecordEvent(*timed, compute_), IsOk());
    }
    to_destroy_ = device_->CreateStream("to destroy").value();
    EXPECT_THAT(device_->RecordEvent(event_, compute_), IsOk());
    Synchronize(compute_);
  }

  // Each call can be made once.
  std::vector<Call> Calls() {
    const CopyPiece in = {data_, host_, 1};
    return {
        {"Allocate", DeviceCall::kAllocate, kEventUs,
         [this] { return device_->Allocate(1, compute_).status(); }},
        {"Free", DeviceCall::kAny, kEventUs,
         [this] { return device_->Free(other_data_, compute_); }},
        {"Pin", DeviceCall::kPin, kPinUs, [this] { return source_->Allocate(kPage).status(); }},
        {"CreateStream", DeviceCall::kCreateStream, kEventUs,
         [this] { return device_->CreateStream("x").status(); }},
        {"DestroyStream", DeviceCall::kAny, 0,
         [this] { return device_->DestroyStream(to_destroy_); }},
        {"Synchronize", DeviceCall::kSynchronize, kEventUs,
         [this] { return device_->SynchronizeStream(compute_); }},
        {"Synchronize", DeviceCall::kSynchronize, kEventUs,
         [this] { return machine_->SynchronizeDevice(0); }},
        {"IsCapturing", DeviceCall::kAny, 0,
         [this] { return device_->IsCapturing(compute_).status(); }},
        {"CreateEvent", DeviceCall::kCreateEvent, kEventUs,
         [this] { return device_->CreateEvent().status(); }},
        {"CreateEvent", DeviceCall::kCreateEvent, kEventUs,
         [this] { return device_->CreateTimedEvent().status(); }},
        {"RecordEvent", DeviceCall::kRecordEvent, kEventUs,
         [this] { return device_->RecordEvent(event_, compute_); }},
        {"StreamWaitEvent", DeviceCall::kStreamWaitEvent, kEventUs,
         [this] { return device_->StreamWaitEvent(out_, event_); }},
        {"QueryEvent", DeviceCall::kQueryEvent, kEventUs,
         [this] { return device_->QueryEvent(event_).status(); }},
        {"WaitEvent", DeviceCall::kWaitEvent, kEventUs,
         [this] { return device_->WaitEvent(event_, absl::InfiniteDuration()); }},
        {"QueryEvent", DeviceCall::kQueryEvent, kEventUs,
         [this] { return device_->ElapsedMs(start_, end_).status(); }},
        {"DestroyEvent", DeviceCall::kAny, 0, [this] { return device_->DestroyEvent(event_); }},
        {"Copy", DeviceCall::kCopy, kCallUs,
         [this, in] {
           return device_->CopyAsync(CopyDirection::kHostToDevice, {&in, 1}, compute_);
         }},
        {"Copy", DeviceCall::kCopy, kCallUs,
         [this] { return machine_->Copy(0, data_, host_, 1, compute_); }},
        {"Kernel", DeviceCall::kKernel, 0, [this] { return machine_->PrepareKernel(0, compute_); }},
        {"Launch", DeviceCall::kAny, kCallUs,
         [this] { return machine_->Launch(0, compute_, Kernel()); }},
        {"RecordStream", DeviceCall::kAny, 0,
         [this] { return machine_->RecordStream(data_, out_); }},
        {"FreePinned", DeviceCall::kAny, 0,
         [this] {
           return source_->Free({segment_, 2 * kPage, -1});
         }},
    };
  }

  uint8_t* data_ = nullptr;
  uint8_t* other_data_ = nullptr;
  uint8_t* host_ = nullptr;
  uint8_t* segment_ = nullptr;
  EventHandle event_, start_, end_;
  StreamHandle to_destroy_;
};

TEST_F(EmulatedCallsTest, EachCallCostsTheHostItsTimeAndCountsAsItsKind) {
  std::vector<Call> calls = Calls();
  for (const Call& call : calls) {
    SCOPED_TRACE(call.name);
    // Earlier work is done, so only the call itself takes time.
    ASSERT_THAT(machine_->SynchronizeDevice(0), IsOk());
    const uint64_t all = machine_->calls(DeviceCall::kAny), mine = machine_->calls(call.kind);
    const double before_ms = machine_->now_ms();
    EXPECT_THAT(call.make(), IsOk());
    EXPECT_NEAR((machine_->now_ms() - before_ms) * 1e3, call.cost_us, 1e-6);
    const int counted = call.kind == DeviceCall::kAny ? 0 : 1;
    EXPECT_EQ(machine_->calls(DeviceCall::kAny), all + counted);
    EXPECT_EQ(machine_->calls(call.kind), mine + counted);
  }
}

TEST_F(EmulatedCallsTest, EachCallFailsAsItsKindDoesOrNotAtAll) {
  std::set<DeviceCall> kinds;
  const size_t count = Calls().size();
  for (size_t i = 0; i < count; ++i) {
    StartWith({});
    const DeviceCall kind = Calls()[i].kind;
    kinds.insert(kind);
    if (kind == DeviceCall::kAny) continue;
    const uint64_t next = machine_->calls(kind) + 1;
    StartWith({.calls = {{kind, next}}});
    const Call call = Calls()[i];
    const bool memory = kind == DeviceCall::kAllocate || kind == DeviceCall::kPin;
    EXPECT_THAT(call.make(), StatusIs(memory ? absl::StatusCode::kResourceExhausted
                                             : absl::StatusCode::kUnavailable,
                                      AllOf(HasSubstr(std::string("emu:0: ") + call.name + " call"),
                                            HasSubstr("transient"))));
    EXPECT_THAT(call.make(), IsOk()) << call.name << ": it has done nothing";
  }
  EXPECT_EQ(kinds.size(), size_t{kDeviceCallKinds});
}

TEST_F(EmulatedCallsTest, EachCallOfABrokenDeviceFailsAndTakesNoTime) {
  const std::vector<Call> calls = Calls();
  machine_->BreakDevice(0, "the first error");
  machine_->BreakDevice(0, "a second one");
  const double before_ms = machine_->now_ms();
  for (const Call& call : calls) {
    EXPECT_THAT(call.make(), StatusIs(absl::StatusCode::kInternal, HasSubstr("the first error")))
        << call.name;
  }
  EXPECT_EQ(machine_->now_ms(), before_ms);
}

TEST_F(EmulatedCallsTest, EachCallRefusesAStreamOrAnEventThatIsGone) {
  const StreamHandle gone = device_->CreateStream("gone").value();
  ASSERT_THAT(device_->DestroyStream(gone), IsOk());
  const EventHandle lost = device_->CreateEvent().value();
  ASSERT_THAT(device_->DestroyEvent(lost), IsOk());
  const CopyPiece in = {data_, host_, 1};
  const absl::Status refusals[] = {
      device_->Allocate(1, gone).status(),
      device_->Free(data_, gone),
      device_->DestroyStream(gone),
      device_->SynchronizeStream(gone),
      device_->IsCapturing(gone).status(),
      device_->RecordEvent(event_, gone),
      device_->StreamWaitEvent(gone, event_),
      device_->CopyAsync(CopyDirection::kHostToDevice, {&in, 1}, gone),
      machine_->Copy(0, data_, host_, 1, gone),
      machine_->PrepareKernel(0, gone),
      machine_->Launch(0, gone, Kernel()),
      machine_->RecordStream(data_, gone),
      machine_->SetCapturing(gone, true),
      device_->DestroyEvent(lost),
      device_->RecordEvent(lost, compute_),
      device_->StreamWaitEvent(compute_, lost),
      device_->QueryEvent(lost).status(),
      device_->WaitEvent(lost, absl::ZeroDuration()),
      device_->ElapsedMs(lost, end_).status(),
      device_->ElapsedMs(start_, lost).status(),
  };
  for (const absl::Status& refusal : refusals) {
    EXPECT_THAT(refusal, IsInvalid("no such"));
  }
  const std::string stream = "; pass one that CreateStream returned";
  const std::string event = "; pass one that CreateEvent returned";
  EXPECT_THAT(refusals[3], IsInvalid("no such stream (destroyed?)" + stream));
  EXPECT_THAT(refusals[16], IsInvalid("no such event (destroyed?)" + event));
  EXPECT_THAT(device_->SynchronizeStream({}), IsInvalid("the handle is empty" + stream));
  EXPECT_THAT(device_->QueryEvent({}), IsInvalid("the event handle is empty" + event));
}

TEST_F(EmulatedCallsTest, ACopyThatSpansTheBorderOfASegmentIsRefused) {
  const auto refused = IsInvalid(
      "2 B of host memory are not inside one pinned segment, nor wholly pageable: split the copy");
  EXPECT_THAT(ToHost(host_ - 1, data_, 2, compute_), refused);
  EXPECT_THAT(ToHost(host_ + kPage - 1, data_, 2, compute_), refused);
}

TEST_F(EmulatedCallsTest, ACopyOfAnotherDevicesMemoryIsRefused) {
  Start(TwoDevices());
  const std::shared_ptr<Device> other = machine_->device(1);
  void* const there = other->Allocate(16, machine_->default_stream(1)).value();
  uint8_t* const host = Pinned(kPage);
  const CopyPiece in = {there, host, 16};
  const CopyPiece out = {host, there, 16};
  const auto refused = IsInvalid("its memory");
  EXPECT_THAT(device_->CopyAsync(CopyDirection::kHostToDevice, {&in, 1}, compute_), refused);
  EXPECT_THAT(device_->CopyAsync(CopyDirection::kDeviceToHost, {&out, 1}, compute_), refused);
  EXPECT_THAT(other->Free(there, machine_->default_stream(1)), IsOk());
}

TEST_F(EmulatedCallsTest, ACopyAcrossTheLinkHasAnEndOnTheHost) {
  const CopyPiece inside = {data_, other_data_, 1};
  for (const CopyDirection direction :
       {CopyDirection::kHostToDevice, CopyDirection::kDeviceToHost}) {
    EXPECT_THAT(device_->CopyAsync(direction, {&inside, 1}, compute_),
                IsInvalid("the other the host's"));
  }
}

TEST_F(EmulatedCallsTest, WholePagesAlonePin) {
  const uint64_t calls = machine_->calls(DeviceCall::kPin);
  for (const uint64_t size_bytes : {uint64_t{0}, kPage + 1}) {
    EXPECT_THAT(source_->Allocate(size_bytes),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         AllOf(HasSubstr(std::to_string(size_bytes) + " bytes are no"),
                               HasSubstr("ask for a positive multiple"))));
  }
  EXPECT_EQ(machine_->calls(DeviceCall::kPin), calls);
}

TEST_F(EmulatedCallsTest, OnlyASegmentOfTheMachineIsFreedAndOnlyOnce) {
  const HostSegment segment = source_->Allocate(2 * kPage).value();
  char* const data = static_cast<char*>(segment.data);
  const auto refused = StatusIs(absl::StatusCode::kInvalidArgument,
                                AllOf(HasSubstr("no pinned segment"), HasSubstr("once")));
  for (const HostSegment& wrong :
       {HostSegment{}, HostSegment{data, kPage, -1}, HostSegment{data + kPage, kPage, -1},
        HostSegment{data_, kPage, -1}}) {
    EXPECT_THAT(source_->Free(wrong), refused);
  }
  EXPECT_THAT(source_->Free(segment), IsOk());
  EXPECT_THAT(source_->Free(segment), refused);
}

}  // namespace emulated_calls_test
}  // namespace pinion
