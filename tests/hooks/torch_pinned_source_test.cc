// Which device a process pins through. What it pins is tested with the host allocator.

#include "pinion/hooks/torch_pinned_source.h"

#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>

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
#include "pinion/tests/support/forwarding_device.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace {

using ::pinion::testing::ForwardingDevice;
using ::pinion::testing::IsOk;
using ::testing::ElementsAre;
using ::testing::Pair;

constexpr int kDevices = 4;

int DeviceWith(const std::set<int>& contexts, int current) {
  return FirstInUse(current, kDevices, [&](int index) { return contexts.count(index) != 0; });
}

TEST(TorchPinnedSource, TheCurrentDevicePinsIfItIsInUse) {
  EXPECT_EQ(DeviceWith({0, 2}, 2), 2);
  EXPECT_EQ(DeviceWith({0, 2}, 0), 0);
}

// A loader's thread has device 0 as its current one, whatever the rank's own is.
TEST(TorchPinnedSource, NoContextIsOpenedOnTheCurrentDeviceWhereAnotherIsInUse) {
  EXPECT_EQ(DeviceWith({3}, 0), 3);
  EXPECT_EQ(DeviceWith({1, 2}, 3), 1);
}

TEST(TorchPinnedSource, TheCurrentDevicePinsWhereNoneIsInUseYet) {
  EXPECT_EQ(DeviceWith({}, 2), 2);
}

// Takes its time.
class SlowSource final : public HostMemorySource {
 public:
  explicit SlowSource(std::shared_ptr<HostMemorySource> source) : source_(std::move(source)) {}
  std::string name() const override { return source_->name(); }
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
  EmulatedOptions options;
  options.memory_bytes = kMiB;
  const auto machine = EmulatedMachine::Create(options).value();
  ASSERT_THAT(RegisterEmuDevice(machine), IsOk());
  const auto open = [&](int index) -> absl::StatusOr<std::shared_ptr<Device>> {
    return std::make_shared<SlowDevice>(machine->device(index));
  };
  const auto source = TorchPinnedSource::Create({"emu", open}, c10::kPrivateUse1).value();
  const HostSegment segment = source->Allocate(source->granularity_bytes()).value();
  ASSERT_THAT(source->Free(segment), IsOk());
  EXPECT_GE(source->GetStats().host_alloc_time.total, 1000);
  EXPECT_GE(source->GetStats().host_free_time.total, 1000);
}

TEST(TorchPinnedSource, EachDeviceIsOpenedOnceHoweverOftenItPins) {
  EmulatedOptions options;
  options.device_count = 2;
  options.memory_bytes = kMiB;
  const auto machine = EmulatedMachine::Create(options).value();
  ASSERT_THAT(RegisterEmuDevice(machine), IsOk());
  const DeviceBackend emulated = EmulatedBackend(machine);
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
