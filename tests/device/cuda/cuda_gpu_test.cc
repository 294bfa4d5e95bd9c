// The conformance suite on the GPUs of this machine. Without any it has nothing to do and says so.

#include <cuda_runtime_api.h>

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gtest/gtest.h"
#include "pinion/device/cuda/cuda_api.h"
#include "pinion/device/cuda/cuda_backend.h"
#include "pinion/device/cuda/cuda_device.h"
#include "pinion/device/cuda/cuda_status.h"
#include "pinion/device/device.h"
#include "pinion/tests/device/device_conformance.h"

namespace pinion {
namespace {

class GpuUnderTest : public DeviceUnderTest {
 public:
  Device& device() override { return device_; }

  absl::Status Fill(void* data, uint8_t value, uint64_t size_bytes, StreamHandle stream) override {
    return CudaStatus(
        RealCudaApi(),
        cudaMemsetAsync(data, value, size_bytes, static_cast<cudaStream_t>(stream.native())),
        "cudaMemsetAsync");
  }

 private:
  CudaDevice device_{RealCudaApi(), 0};
};

std::unique_ptr<DeviceUnderTest> MakeGpu() { return std::make_unique<GpuUnderTest>(); }

std::vector<DeviceConformanceCase> Gpus() {
  if (!CudaDeviceCount().ok()) return {};
  return {{"Gpu0", MakeGpu}};
}

TEST(CudaGpuTest, ThisMachineHasAGpu) {
  const absl::StatusOr<int> count = CudaDeviceCount();
  if (!count.ok()) GTEST_SKIP() << count.status();
  EXPECT_GE(*count, 1);
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(DeviceConformanceTest);
INSTANTIATE_TEST_SUITE_P(Cuda, DeviceConformanceTest, ::testing::ValuesIn(Gpus()),
                         DeviceConformanceCaseName);

}  // namespace
}  // namespace pinion
