// Wrong uses of the emulated machine. Each ends in an error that names the value; a call that
// returns no error ends the process with the same words. tests/misuse.md lists all such tests.

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/allocation_label.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_backend.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/device/host_arithmetic.h"
#include "pinion/tests/device/emulated/emulated_fixture.h"
#include "pinion/tests/support/captured_log.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace emulated_misuse_test {

using ::pinion::testing::CapturedLog;
using ::pinion::testing::IsOk;
using ::pinion::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr uint64_t kPage = 4 * kKiB;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

class EmulatedMisuseTest : public EmulatedFixture {
 protected:
  EmulatedMisuseTest() {
    Start(Options());
    data_ = OnDevice(kPage);
    host_ = Pinned(kPage);
  }

  static Kernel Of(std::vector<ByteRange> reads) {
    return {.name = "mm", .reads = std::move(reads), .writes = {}};
  }

  uint8_t* data_;
  uint8_t* host_;
};

TEST_F(EmulatedMisuseTest, ADeviceThatThereIsNotIsRefusedByEachCallThatReturnsAStatus) {
  const struct {
    const char* name;
    std::function<absl::Status(int device)> call;
  } rows[] = {
      {"PrepareKernel", [&](int device) { return machine_->PrepareKernel(device, compute_); }},
      {"Launch", [&](int device) { return machine_->Launch(device, compute_, Of({})); }},
      {"Copy", [&](int device) { return machine_->Copy(device, data_, host_, 1, compute_); }},
      {"SynchronizeDevice", [&](int device) { return machine_->SynchronizeDevice(device); }},
      {"SetMemoryLimit", [&](int device) { return machine_->SetMemoryLimit(device, kMiB); }},
  };
  for (const auto& row : rows) {
    for (const int device : {-1, 1, 9, INT32_MIN, INT32_MAX}) {
      CountHostArithmetic(kMiB);  // a call adds its time to the device's statistics
      EXPECT_THAT(row.call(device),
                  StatusIs(absl::StatusCode::kInvalidArgument,
                           AllOf(HasSubstr("no device emu:" + std::to_string(device) + ";"),
                                 HasSubstr("there are 1 (EmulatedOptions::device_count)"))))
          << row.name;
    }
  }
}

TEST_F(EmulatedMisuseTest, ADeviceThatThereIsNotEndsCallsThatReturnNoStatus) {
  const struct {
    const char* name;
    std::function<void(int device)> call;
  } rows[] = {
      {"device", [&](int device) { machine_->device(device); }},
      {"default_stream", [&](int device) { machine_->default_stream(device); }},
      {"memory_stats", [&](int device) { machine_->memory_stats(device); }},
      {"ResetPeakMemory", [&](int device) { machine_->ResetPeakMemory(device); }},
      {"time_stats", [&](int device) { machine_->time_stats(device); }},
      {"ResetTimeStats", [&](int device) { machine_->ResetTimeStats(device); }},
      {"MemoryReport", [&](int device) { (void)machine_->MemoryReport(device); }},
      {"BreakDevice", [&](int device) { machine_->BreakDevice(device, "broken"); }},
  };
  for (const auto& row : rows) {
    SCOPED_TRACE(row.name);
    EXPECT_DEATH(row.call(1), "no device emu:1; there are 1");
    EXPECT_DEATH(row.call(-1), "no device emu:-1; there are 1");
  }
  EXPECT_DEATH(machine_->BreakDevice(0, ""), "breaks with an error that says why");
}

TEST_F(EmulatedMisuseTest, NullPointersAreRefused) {
  const struct {
    const char* name;
    absl::Status status;
    const char* message;
  } rows[] = {
      {"copy from null", ToDevice(data_, nullptr, 8, compute_), "8 B at a null pointer: pass the"},
      {"copy to null", ToHost(nullptr, data_, 8, compute_), "8 B at a null pointer"},
      {"copy of null on the device", ToHost(host_, nullptr, 8, compute_), "a null pointer"},
      {"Copy from null", machine_->Copy(0, data_, nullptr, 8, compute_), "a null pointer"},
      {"Copy to null", machine_->Copy(0, nullptr, data_, 8, compute_), "a null pointer"},
      {"a kernel that reads null", machine_->Launch(0, compute_, Of({{nullptr, 8}})),
       "kernel mm: 8 B at a null pointer"},
      {"RecordStream", machine_->RecordStream(nullptr, compute_), "0x0 is not device memory; pass"},
      {"Free", Free(nullptr), "not allocated"},
  };
  for (const auto& row : rows) {
    EXPECT_THAT(row.status, IsInvalid(row.message)) << row.name;
  }
  EXPECT_THAT(machine_->Launch(0, compute_, Of({{nullptr, 0}})), IsOk()) << "an empty tensor's";
  EXPECT_TRUE(machine_->IsDevicePointer(data_, nullptr));
  EXPECT_FALSE(machine_->IsDevicePointer(nullptr, nullptr));
  EXPECT_FALSE(machine_->IsPinned(nullptr));
}

TEST_F(EmulatedMisuseTest, SizesThatNoMemoryHasAreRefused) {
  // Adding these sizes to the address overflows.
  const uint64_t to_the_end = UINT64_MAX - reinterpret_cast<uintptr_t>(data_);
  for (const uint64_t size_bytes : {UINT64_MAX, UINT64_MAX - 1, to_the_end, to_the_end + 2}) {
    const struct {
      const char* name;
      absl::Status status;
    } rows[] = {
        {"CopyAsync to the device", ToDevice(data_, host_, size_bytes, compute_)},
        {"CopyAsync to the host", ToHost(host_, data_, size_bytes, compute_)},
        {"Copy", machine_->Copy(0, data_, host_, size_bytes, compute_)},
        {"Launch", machine_->Launch(0, compute_, Of({{data_, size_bytes}}))},
    };
    for (const auto& row : rows) {
      EXPECT_THAT(row.status, IsInvalid("not inside one live allocation"))
          << row.name << " of " << size_bytes;
    }
    EXPECT_THAT(device_->Allocate(size_bytes, compute_),
                StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("out of memory")));
  }
  uint8_t pageable[8] = {};
  for (uint8_t* const host : {host_, pageable}) {
    EXPECT_THAT(machine_->Launch(0, compute_, Of({{host, UINT64_MAX}})),
                IsInvalid("kernel mm: no memory has 18446744073709551615 bytes"));
  }
  EXPECT_THAT(machine_->HostAccess(host_, UINT64_MAX, /*write=*/true),
              IsInvalid("18446744073709551615 bytes"));
  EXPECT_THAT(machine_->SetMemoryLimit(0, UINT64_MAX), IsInvalid("more than twice memory_bytes"));
  EXPECT_EQ(Memory().in_use_bytes, kPage);
}

TEST_F(EmulatedMisuseTest, AKernelCostsAFiniteNumber) {
  for (double Kernel::*cost : {&Kernel::flops, &Kernel::memory_bytes}) {
    for (const double value : {-1.0, kInfinity, -kInfinity, kNaN}) {
      Kernel kernel = Of({});
      kernel.*cost = value;
      EXPECT_THAT(
          machine_->Launch(0, compute_, kernel),
          StatusIs(absl::StatusCode::kInvalidArgument,
                   AllOf(HasSubstr("kernel mm: flops or memory_bytes is " + std::to_string(value)),
                         HasSubstr("finite"))));
    }
  }
}

TEST_F(EmulatedMisuseTest, EventsThatTellNoTimeAreRefusedWithTheReason) {
  Start(TwoDevices());
  const std::shared_ptr<Device> other = machine_->device(1);
  const auto recorded = [](Device& device, EventHandle event, StreamHandle stream) {
    EXPECT_THAT(device.RecordEvent(event, stream), IsOk());
    EXPECT_THAT(device.SynchronizeStream(stream), IsOk());
    return event;
  };
  const EventHandle timed = recorded(*device_, device_->CreateTimedEvent().value(), compute_);
  const EventHandle there =
      recorded(*other, other->CreateTimedEvent().value(), machine_->default_stream(1));
  const EventHandle untimed = recorded(*device_, device_->CreateEvent().value(), compute_);
  const EventHandle gone = device_->CreateTimedEvent().value();
  ASSERT_THAT(device_->DestroyEvent(gone), IsOk());
  const struct {
    const char* name;
    EventHandle event;
    const char* message;
  } rows[] = {
      {"empty", EventHandle(), "the event handle is empty"},
      {"destroyed", gone, "no such event"},
      {"without timing", untimed, "without timing, or one that was never recorded: pass events"},
      {"never recorded", device_->CreateTimedEvent().value(), "one that was never recorded"},
      {"of another device", there, "not of one device: pass two that one device"},
  };
  for (const auto& row : rows) {
    const auto refused = IsInvalid(row.message);
    EXPECT_THAT(device_->ElapsedMs(timed, row.event), refused) << row.name;
    EXPECT_THAT(device_->ElapsedMs(row.event, timed), refused) << row.name;
  }
  EXPECT_THAT(device_->ElapsedMs(timed, timed), IsOk());
}

TEST_F(EmulatedMisuseTest, AnEventOrAStreamThatThereIsNotIsNeitherWaitedForNorCaptured) {
  for (const absl::Duration timeout : {absl::Seconds(-1), absl::InfiniteDuration()}) {
    EXPECT_THAT(device_->WaitEvent(EventHandle(), timeout), IsInvalid("handle is empty"));
  }
  const StreamHandle gone(&host_);
  for (const auto& [stream, why] :
       {std::pair(StreamHandle(), "empty"), std::pair(gone, "destroyed")}) {
    const auto refused = StatusIs(absl::StatusCode::kInvalidArgument,
                                  AllOf(HasSubstr("no such stream"), HasSubstr(why),
                                        HasSubstr("pass one that CreateStream")));
    EXPECT_THAT(machine_->SetCapturing(stream, true), refused);
    EXPECT_THAT(machine_->RecordStream(data_, stream), refused);
  }
}

TEST_F(EmulatedMisuseTest, AHostAccessIsToMemory) {
  EXPECT_THAT(machine_->HostAccess(nullptr, 8, /*write=*/true),
              IsInvalid("no memory has 8 bytes from 0 on"));
  EXPECT_THAT(machine_->HostAccess(nullptr, 0, /*write=*/false), IsOk()) << "an empty tensor's";
}

TEST_F(EmulatedMisuseTest, AStreamOrAnEventOfAnotherMachineIsRefused) {
  const auto other = EmulatedMachine::Create(Options()).value();
  const StreamHandle stream = other->default_stream(0);
  const EventHandle event = other->device(0)->CreateEvent().value();
  EXPECT_THAT(device_->IsCapturing(stream), IsInvalid("no such stream"));
  EXPECT_THAT(device_->SynchronizeStream(stream), IsInvalid("no such stream"));
  EXPECT_THAT(device_->QueryEvent(event), IsInvalid("no such event"));
  EXPECT_THAT(other->device(0)->DestroyEvent(event), IsOk());
}

TEST(AllocationLabelMisuseTest, OneThatEndsOnAnotherThreadIsToldOfAndStays) {
  std::thread([] {
    auto label = std::make_unique<const AllocationLabel>("label");
    const CapturedLog log;
    std::thread([&label] { label.reset(); }).join();
    EXPECT_THAT(log.text(), AllOf(HasSubstr("AllocationLabel has ended on another thread"),
                                  HasSubstr("end labels on the thread that opens them")));
    EXPECT_EQ(AllocationLabel::Current(), "label");
  }).join();
}

TEST(AllocationLabelMisuseTest, AnEmptyLabelIsNone) {
  const AllocationLabel empty("");
  EXPECT_EQ(AllocationLabel::Current(), "");
  {
    const AllocationLabel inner("inner");
    EXPECT_EQ(AllocationLabel::Current(), "inner");
  }
  EXPECT_EQ(AllocationLabel::Current(), "");
}

TEST(EmulatedBackendMisuseTest, ABackendWithoutAMachineSaysSo) {
  EXPECT_THAT(EmulatedBackend(nullptr).device(0), IsInvalid("EmulatedMachine::Create"));
}

}  // namespace emulated_misuse_test
}  // namespace pinion
