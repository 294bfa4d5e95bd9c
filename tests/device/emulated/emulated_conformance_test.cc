// Runs the conformance suite on the emulated device with every effect schedule, both reuse modes,
// and protected host pages.

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/tests/device/device_conformance.h"

namespace pinion {
namespace {

class EmulatedUnderTest : public DeviceUnderTest {
 public:
  explicit EmulatedUnderTest(const EmulatedOptions& options)
      : machine_(EmulatedMachine::Create(options).value()), device_(machine_->device(1)) {}

  Device& device() override { return *device_; }

  absl::Status Fill(void* data, uint8_t value, uint64_t size_bytes, StreamHandle stream) override {
    PINION_RETURN_IF_ERROR(machine_->PrepareKernel(1, stream));
    std::memset(data, value, size_bytes);
    Kernel fill;
    fill.name = "fill";
    fill.writes = {{data, size_bytes}};
    return machine_->Launch(1, stream, fill);
  }

  std::vector<std::string> Complaints() override { return machine_->races(); }
  uint64_t memory_bytes() override { return machine_->memory_stats(1).limit_bytes; }

 private:
  std::shared_ptr<EmulatedMachine> machine_;
  std::shared_ptr<Device> device_;
};

template <EffectSchedule schedule, ReuseMode reuse, bool protect = false>
std::unique_ptr<DeviceUnderTest> MakeEmulated() {
  EmulatedOptions options;
  options.device_count = 2;
  options.memory_bytes = 64 * kMiB;
  options.schedule = schedule;
  options.reuse = reuse;
  options.protect_host_pages = protect;
  options.abort_on_race = false;
  return std::make_unique<EmulatedUnderTest>(options);
}

INSTANTIATE_TEST_SUITE_P(
    Emulated, DeviceConformanceTest,
    ::testing::Values(
        DeviceConformanceCase{"EarlyImmediate",
                              MakeEmulated<EffectSchedule::kEarly, ReuseMode::kImmediate>, 1},
        DeviceConformanceCase{"LateImmediate",
                              MakeEmulated<EffectSchedule::kLate, ReuseMode::kImmediate>, 1},
        DeviceConformanceCase{"RandomImmediate",
                              MakeEmulated<EffectSchedule::kRandom, ReuseMode::kImmediate>, 1},
        DeviceConformanceCase{"EarlyQuarantine",
                              MakeEmulated<EffectSchedule::kEarly, ReuseMode::kQuarantine>, 1},
        DeviceConformanceCase{"LateQuarantine",
                              MakeEmulated<EffectSchedule::kLate, ReuseMode::kQuarantine>, 1},
        DeviceConformanceCase{"RandomQuarantine",
                              MakeEmulated<EffectSchedule::kRandom, ReuseMode::kQuarantine>, 1},
        DeviceConformanceCase{"RandomImmediateProtected",
                              MakeEmulated<EffectSchedule::kRandom, ReuseMode::kImmediate, true>,
                              1}),
    DeviceConformanceCaseName);

}  // namespace
}  // namespace pinion
