// Runs the conformance suite, the engine and the latency kernel on this
// machine's GPUs. Skips every test if there is none.

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/device/cuda/cuda_api.h"
#include "pinion/device/cuda/cuda_backend.h"
#include "pinion/device/cuda/cuda_calls.h"
#include "pinion/device/cuda/cuda_device.h"
#include "pinion/device/device.h"
#include "pinion/tests/device/cuda/engine_round_trip.h"
#include "pinion/tests/device/device_conformance.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace {

using ::pinion::testing::IsOk;

class GpuUnderTest : public DeviceUnderTest {
 public:
  Device& device() override { return device_; }

  absl::Status Fill(void* data, uint8_t value, uint64_t size_bytes, StreamHandle stream) override {
    return CudaStatus(
        RealCudaApi(),
        cudaMemsetAsync(data, value, size_bytes, static_cast<cudaStream_t>(stream.native())),
        "cudaMemsetAsync");
  }

  uint64_t memory_bytes() override {
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    EXPECT_EQ(RealCudaApi().MemGetInfo(&free_bytes, &total_bytes), cudaSuccess);
    return total_bytes;
  }

 private:
  CudaDevice device_{RealCudaApi(), 0};
};

std::unique_ptr<DeviceUnderTest> MakeGpu() { return std::make_unique<GpuUnderTest>(); }

std::vector<DeviceConformanceCase> Gpus() {
  if (!CudaDeviceCount().ok()) return {};
  return {{"Gpu0", MakeGpu, 0}};
}

class CudaGpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const absl::StatusOr<int> count = CudaDeviceCount();
    if (!count.ok()) GTEST_SKIP() << count.status();
  }
};

TEST_F(CudaGpuTest, SaysWhatItIsAndWhatLinkItHangsOn) {
  const DeviceInfo info = CudaDevice(RealCudaApi(), 0).info();
  EXPECT_NE(info.model, "");
  EXPECT_FALSE(info.modelled);
  RecordProperty("model", info.model);
  RecordProperty("link", info.link_name);
}

TEST_F(CudaGpuTest, TheEngineMovesMemoryOfCudaHostAlloc) {
  GpuUnderTest gpu;
  testing::ExpectEngineRoundTrip(gpu, gpu.device().pinned_source());
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(DeviceConformanceTest);
INSTANTIATE_TEST_SUITE_P(Cuda, DeviceConformanceTest, ::testing::ValuesIn(Gpus()),
                         DeviceConformanceCaseName);

}  // namespace
}  // namespace pinion
