// Checks through which device a process pins memory, and the statistics of it. The host allocator's
// tests check the pinned blocks.

#include "pinion/hooks/tier/torch_pinned_source.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/device/device.h"
#include "pinion/device/device_backend.h"
#include "pinion/device/emulated/emulated_backend.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/emulated/emu_device.h"
#include "pinion/tests/hooks/support/error_of.h"
#include "pinion/tests/support/forwarding_device.h"
#include "pinion/tests/support/source_adaptor.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace {

using ::pinion::testing::ErrorOf;
using ::pinion::testing::ForwardingDevice;
using ::pinion::testing::IsOk;
using ::pinion::testing::SourceAdaptor;
using ::pinion::testing::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

constexpr int kDevices = 4;

int DeviceWith(const std::set<int>& contexts, int current) {
  return FirstInUse(current, kDevices, [&](int index) { return contexts.count(index) != 0; });
}

TEST(TorchPinnedSource, TheCurrentDevicePinsIfItIsInUse) {
  EXPECT_EQ(DeviceWith({0, 2}, 2), 2);
  EXPECT_EQ(DeviceWith({0, 2}, 0), 0);
}

// A data loader's thread has device 0 as its current device on every rank.
TEST(TorchPinnedSource, NoContextIsOpenedOnTheCurrentDeviceWhereAnotherIsInUse) {
  EXPECT_EQ(DeviceWith({3}, 0), 3);
  EXPECT_EQ(DeviceWith({1, 2}, 3), 1);
}

TEST(TorchPinnedSource, TheCurrentDevicePinsWhereNoneIsInUseYet) {
  EXPECT_EQ(DeviceWith({}, 2), 2);
}

TEST(TorchPinnedSource, WithoutAFunctionThatTellsWhatIsInUseThereIsAnErrorWithTheRemedy) {
  EXPECT_THAT(ErrorOf([] { FirstInUse(0, kDevices, nullptr); }),
              AllOf(HasSubstr("in_use is null"), HasSubstr("pass a function")));
}

// The devices of a machine registered as "emu".
DeviceBackend Registered(int device_count = 1) {
  EmulatedOptions options;
  options.device_count = device_count;
  options.memory_bytes = kMiB;
  const auto machine = EmulatedMachine::Create(options).value();
  EXPECT_THAT(RegisterEmuDevice(machine), IsOk());
  return EmulatedBackend(machine);
}

TEST(TorchPinnedSource, ItIsNamedAfterTheFirstDevicesOwn) {
  const DeviceBackend backend = Registered();
  const auto source = TorchPinnedSource::Create(backend, c10::kPrivateUse1).value();
  const auto own = backend.device(0).value()->pinned_source();
  EXPECT_EQ(source->name(), own->name());
  EXPECT_EQ(source->granularity_bytes(), own->granularity_bytes());
}

TEST(TorchPinnedSource, WithoutADeviceOfLibTorchsThereIsNothingToPinWith) {
  const auto source = TorchPinnedSource::Create(Registered(), c10::kXPU).value();
  EXPECT_THAT(source->Allocate(source->granularity_bytes()).status(),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("no device to pin with")));
}

TEST(TorchPinnedSource, ASegmentOfAnotherSourceIsNotFreed) {
  const DeviceBackend backend = Registered();
  const auto source = TorchPinnedSource::Create(backend, c10::kPrivateUse1).value();
  const auto own = backend.device(0).value()->pinned_source();
  const HostSegment segment = own->Allocate(own->granularity_bytes()).value();
  for (const HostSegment& wrong : {segment, HostSegment{}}) {
    EXPECT_THAT(source->Free(wrong),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         AllOf(HasSubstr("is no segment of this source in use"),
                               HasSubstr("each segment that its Allocate returned"))));
  }
  EXPECT_THAT(own->Free(segment), IsOk());
}

TEST(TorchPinnedSource, ResetsForgetWhatWasAndKeepWhatIs) {
  const auto source = TorchPinnedSource::Create(Registered(), c10::kPrivateUse1).value();
  const uint64_t page_bytes = source->granularity_bytes();
  const HostSegment kept = source->Allocate(page_bytes).value();
  const HostSegment freed = source->Allocate(2 * page_bytes).value();
  ASSERT_THAT(source->Free(freed), IsOk());
  const auto page = static_cast<int64_t>(page_bytes);
  at::HostStats stats = source->GetStats();
  EXPECT_EQ(stats.allocations.allocated, 2);
  EXPECT_EQ(stats.allocations.freed, 1);
  EXPECT_EQ(stats.allocations.peak, 2);
  EXPECT_EQ(stats.allocated_bytes.allocated, 3 * page);
  EXPECT_EQ(stats.allocated_bytes.freed, 2 * page);
  EXPECT_EQ(stats.allocated_bytes.peak, 3 * page);
  EXPECT_EQ(stats.host_alloc_time.count, 2);
  EXPECT_EQ(stats.host_free_time.count, 1);
  source->ResetAccumulatedStats();
  source->ResetPeakStats();
  stats = source->GetStats();
  for (const c10::CachingAllocator::Stat* stat : {&stats.allocations, &stats.allocated_bytes}) {
    EXPECT_EQ(stat->allocated, 0);
    EXPECT_EQ(stat->freed, 0);
    EXPECT_EQ(stat->current, stat == &stats.allocations ? 1 : page);
    EXPECT_EQ(stat->peak, stat->current);
  }
  for (const c10::CachingAllocator::DurationStat* time :
       {&stats.host_alloc_time, &stats.host_free_time}) {
    EXPECT_EQ(time->total, 0);
    EXPECT_EQ(time->count, 0);
    EXPECT_EQ(time->max, 0);
  }
  EXPECT_EQ(stats.num_host_alloc, 0);
  EXPECT_EQ(stats.num_host_free, 0);
  EXPECT_THAT(source->Free(kept), IsOk());
}

// Fails to free memory at first.
class FailingSource final : public SourceAdaptor {
 public:
  using SourceAdaptor::SourceAdaptor;
  absl::Status Free(const HostSegment& segment) override {
    if (fails_.exchange(false)) return absl::UnavailableError("not unpinned");
    return SourceAdaptor::Free(segment);
  }

 private:
  std::atomic<bool> fails_ = true;
};

class FailingDevice final : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  std::shared_ptr<HostMemorySource> pinned_source() override {
    return std::make_shared<FailingSource>(ForwardingDevice::pinned_source());
  }
};

TEST(TorchPinnedSource, WhatCouldNotBeUnpinnedIsNotCountedAsFreedAndCanBeFreedAgain) {
  const DeviceBackend emulated = Registered();
  const auto open = [&](int index) -> absl::StatusOr<std::shared_ptr<Device>> {
    return std::make_shared<FailingDevice>(emulated.device(index).value());
  };
  const auto source = TorchPinnedSource::Create({"emu", open}, c10::kPrivateUse1).value();
  const HostSegment segment = source->Allocate(source->granularity_bytes()).value();
  EXPECT_THAT(source->Free(segment),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("not unpinned")));
  const at::HostStats stats = source->GetStats();
  EXPECT_EQ(stats.allocations.freed, 0);
  EXPECT_EQ(stats.num_host_free, 0);
  EXPECT_EQ(static_cast<uint64_t>(stats.allocated_bytes.current), segment.size_bytes);
  EXPECT_EQ(stats.host_free_time.count, 0);
  EXPECT_THAT(source->Free(segment), IsOk());
  EXPECT_EQ(source->GetStats().allocations.freed, 1);
  EXPECT_EQ(source->GetStats().num_host_free, 1);
}

// A source whose memory the system refuses to lock.
class UnlockedSource final : public SourceAdaptor {
 public:
  using SourceAdaptor::SourceAdaptor;
  bool pinned() const override { return !has_allocated_; }
  absl::StatusOr<HostSegment> Allocate(uint64_t size_bytes) override {
    has_allocated_ = true;
    return SourceAdaptor::Allocate(size_bytes);
  }

 private:
  std::atomic<bool> has_allocated_ = false;
};

class UnlockedDevice final : public ForwardingDevice {
 public:
  explicit UnlockedDevice(std::shared_ptr<Device> device)
      : ForwardingDevice(std::move(device)),
        source_(std::make_shared<UnlockedSource>(ForwardingDevice::pinned_source())) {}
  std::shared_ptr<HostMemorySource> pinned_source() override { return source_; }

 private:
  const std::shared_ptr<HostMemorySource> source_;
};

TEST(TorchPinnedSource, ItIsPinnedUntilAnyDeviceHasGivenMemoryThatIsNotLocked) {
  const DeviceBackend emulated = Registered(/*device_count=*/2);
  for (const int unlocked : {0, 1}) {
    const auto open = [&](int index) -> absl::StatusOr<std::shared_ptr<Device>> {
      std::shared_ptr<Device> device = emulated.device(index).value();
      if (index == unlocked) return std::make_shared<UnlockedDevice>(std::move(device));
      return device;
    };
    const auto source = TorchPinnedSource::Create({"emu", open}, c10::kPrivateUse1).value();
    for (const int index : {1 - unlocked, unlocked, 1 - unlocked}) {
      EXPECT_EQ(source->pinned(), source->GetStats().allocations.allocated < 2) << unlocked;
      const c10::DeviceGuard guard(
          c10::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(index)));
      const HostSegment segment = source->Allocate(source->granularity_bytes()).value();
      EXPECT_THAT(source->Free(segment), IsOk());
    }
    EXPECT_FALSE(source->pinned()) << unlocked;
  }
}

// A source that takes time.
class SlowSource final : public HostMemorySource {
 public:
  explicit SlowSource(std::shared_ptr<HostMemorySource> source) : source_(std::move(source)) {}
  std::string name() const override { return source_->name(); }
  bool pinned() const override { return source_->pinned(); }
  uint64_t granularity_bytes() const override { return source_->granularity_bytes(); }
  absl::StatusOr<HostSegment> Allocate(uint64_t size_bytes) override {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    return source_->Allocate(size_bytes);
  }
  absl::Status Free(const HostSegment& segment) override {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    return source_->Free(segment);
  }

 private:
  const std::shared_ptr<HostMemorySource> source_;
};

class SlowDevice final : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  std::shared_ptr<HostMemorySource> pinned_source() override {
    return std::make_shared<SlowSource>(ForwardingDevice::pinned_source());
  }
};

TEST(TorchPinnedSource, TimesAreWhatPinningAndUnpinningTook) {
  const DeviceBackend emulated = Registered();
  const auto open = [&](int index) -> absl::StatusOr<std::shared_ptr<Device>> {
    return std::make_shared<SlowDevice>(emulated.device(index).value());
  };
  const auto source = TorchPinnedSource::Create({"emu", open}, c10::kPrivateUse1).value();
  const HostSegment segment = source->Allocate(source->granularity_bytes()).value();
  ASSERT_THAT(source->Free(segment), IsOk());
  EXPECT_GE(source->GetStats().host_alloc_time.total, 1000);
  EXPECT_GE(source->GetStats().host_free_time.total, 1000);
}

TEST(TorchPinnedSource, EachDeviceIsOpenedOnceHoweverOftenItPins) {
  const DeviceBackend emulated = Registered(/*device_count=*/2);
  std::map<int, int> opened;
  const auto open = [&](int index) {
    ++opened[index];
    return emulated.device(index);
  };
  const auto source =
      TorchPinnedSource::Create({emulated.type_name, open}, c10::kPrivateUse1).value();
  for (const int index : {0, 1, 0, 1}) {
    const c10::DeviceGuard guard(
        c10::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(index)));
    const HostSegment segment = source->Allocate(source->granularity_bytes()).value();
    EXPECT_THAT(source->Free(segment), IsOk());
  }
  EXPECT_THAT(opened, ElementsAre(Pair(0, 1), Pair(1, 1)));
}

}  // namespace
}  // namespace pinion
