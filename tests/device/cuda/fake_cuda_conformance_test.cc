// Runs the conformance suite and the engine's round trip on CudaDevice over the fake
// runtime.

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/device/cuda/cuda_api.h"
#include "pinion/device/cuda/cuda_device.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/tests/device/cuda/engine_round_trip.h"
#include "pinion/tests/device/cuda/fake_cuda.h"
#include "pinion/tests/device/device_conformance.h"

namespace pinion {
namespace {

using ::pinion::testing::FakeCuda;

EmulatedOptions TwoDevices() {
  EmulatedOptions options;
  options.device_count = 2;
  options.memory_bytes = 64 * kMiB;
  options.abort_on_race = false;
  return options;
}

// Tests device 1, so that a call which does not make its device current fails.
class FakeCudaUnderTest : public DeviceUnderTest {
 public:
  Device& device() override { return device_; }

  absl::Status Fill(void* data, uint8_t value, uint64_t size_bytes, StreamHandle stream) override {
    PINION_RETURN_IF_ERROR(fake_.machine().PrepareKernel(1, stream));
    std::memset(data, value, size_bytes);
    Kernel fill;
    fill.name = "fill";
    fill.writes = {{data, size_bytes}};
    return fake_.machine().Launch(1, stream, fill);
  }

  std::vector<std::string> Complaints() override { return fake_.machine().races(); }
  uint64_t memory_bytes() override { return fake_.machine().memory_stats(1).limit_bytes; }

 private:
  FakeCuda fake_{TwoDevices()};
  CudaDevice device_{FakeCuda::Api(), 1};
};

std::unique_ptr<DeviceUnderTest> MakeFakeCuda() { return std::make_unique<FakeCudaUnderTest>(); }

INSTANTIATE_TEST_SUITE_P(FakeCuda, DeviceConformanceTest,
                         ::testing::Values(DeviceConformanceCase{"Cuda1", MakeFakeCuda, 1}),
                         DeviceConformanceCaseName);

TEST(EngineOnFakeCudaTest, BytesGoOutAndComeBack) {
  FakeCudaUnderTest under_test;
  testing::ExpectEngineRoundTrip(under_test, under_test.device().pinned_source());
  EXPECT_THAT(under_test.Complaints(), ::testing::IsEmpty());
}

}  // namespace
}  // namespace pinion
