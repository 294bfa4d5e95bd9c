// The GPUs of this machine: the conformance suite (timed events among it), the engine on memory of
// either source, the latency kernel. Without any GPU there is nothing to do, and each test says so.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/device/cuda/cuda_api.h"
#include "pinion/device/cuda/cuda_backend.h"
#include "pinion/device/cuda/cuda_device.h"
#include "pinion/device/cuda/cuda_registered_source.h"
#include "pinion/device/cuda/cuda_status.h"
#include "pinion/device/cuda/host_latency.h"
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

 private:
  CudaDevice device_{RealCudaApi(), 0};
};

std::unique_ptr<DeviceUnderTest> MakeGpu() { return std::make_unique<GpuUnderTest>(); }

std::vector<DeviceConformanceCase> Gpus() {
  if (!CudaDeviceCount().ok()) return {};
  return {{"Gpu0", MakeGpu}};
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

TEST_F(CudaGpuTest, TheEngineMovesRegisteredMemory) {
  const auto source = CudaRegisteredSource::Create(RealCudaApi(), 0, {.touch_threads = 4});
  if (absl::IsFailedPrecondition(source.status())) GTEST_SKIP() << source.status();
  GpuUnderTest gpu;
  testing::ExpectEngineRoundTrip(gpu, source.value());
}

// More than one registration, and a copy across their border: as a batch and one by one.
TEST_F(CudaGpuTest, ACopySpansTwoRegistrations) {
  const auto source = CudaRegisteredSource::Create(RealCudaApi(), 0, {.touch_threads = 4});
  if (absl::IsFailedPrecondition(source.status())) GTEST_SKIP() << source.status();
  PINION_ASSERT_OK_AND_ASSIGN(const HostSegment segment, source.value()->Allocate(kGiB + 4 * kMiB));
  char* const begin = static_cast<char*>(segment.data);
  const uint64_t border = BytesToRegistrationBorder(begin, segment.size_bytes);
  const uint64_t before = std::min(border, kMiB);
  const uint64_t size_bytes = before + std::min(segment.size_bytes - border, kMiB);
  char* const host = begin + border - before;
  CudaApi without_batch_api = RealCudaApi();
  without_batch_api.MemcpyBatchAsync = nullptr;
  CudaDevice with_batch(RealCudaApi(), 0);
  CudaDevice without_batch(without_batch_api, 0);
  for (CudaDevice* const device : {&with_batch, &without_batch}) {
    const StreamHandle stream = device->CreateStream("s").value();
    void* const there = device->Allocate(size_bytes, stream).value();
    std::memset(host, 5, size_bytes);
    const CopyPiece in = {there, host, size_bytes};
    const CopyPiece out = {host, there, size_bytes};
    EXPECT_THAT(device->CopyAsync(CopyDirection::kHostToDevice, {&in, 1}, stream), IsOk());
    EXPECT_THAT(device->SynchronizeStream(stream), IsOk());
    std::memset(host, 0, size_bytes);
    EXPECT_THAT(device->CopyAsync(CopyDirection::kDeviceToHost, {&out, 1}, stream), IsOk());
    EXPECT_THAT(device->SynchronizeStream(stream), IsOk());
    EXPECT_EQ(host[0], 5);
    EXPECT_EQ(std::memcmp(host, host + 1, size_bytes - 1), 0);
    EXPECT_THAT(device->Free(there, stream), IsOk());
    EXPECT_THAT(device->DestroyStream(stream), IsOk());
  }
  EXPECT_THAT(source.value()->Free(segment), IsOk());
}

TEST_F(CudaGpuTest, ReadingHostMemoryTakesAMicrosecondOrSo) {
  PINION_ASSERT_OK_AND_ASSIGN(const double ns, MeasureHostLatencyNs(RealCudaApi(), 0, 100'000));
  EXPECT_GT(ns, 50);
  EXPECT_LT(ns, 100'000);
  RecordProperty("host_latency_ns", std::to_string(ns));
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(DeviceConformanceTest);
INSTANTIATE_TEST_SUITE_P(Cuda, DeviceConformanceTest, ::testing::ValuesIn(Gpus()),
                         DeviceConformanceCaseName);

}  // namespace
}  // namespace pinion
