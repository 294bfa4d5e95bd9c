#include <cuda_runtime_api.h>

#include <fstream>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/device/cuda/cuda_api.h"
#include "pinion/programs/accelerator.h"

namespace pinion {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Returns the real CudaApi with another device count.
CudaApi ApiThatCounts(cudaError_t (*count)(int*)) {
  CudaApi api = RealCudaApi();
  api.GetDeviceCount = count;
  return api;
}

const CudaApi kNoDriver = ApiThatCounts([](int* count) {
  *count = 0;
  return cudaErrorInsufficientDriver;
});
const CudaApi kOneDevice = ApiThatCounts([](int* count) {
  *count = 1;
  return cudaSuccess;
});

CudaInstallation Installation(const CudaApi& api, bool driver_file) {
  const std::string path = testing::TempDir() + "/driver";
  if (driver_file) std::ofstream(path) << "NVRM version";
  return {driver_file ? path : "/no/driver", "/no/torch", api};
}

TEST(ChooseDevice, WithoutADriverTheEmulatedDeviceIsTheDefault) {
  EXPECT_EQ(*ChooseDevice("", Installation(kNoDriver, false)), "emu:0");
}

TEST(ChooseDevice, ADriverThatCannotBeUsedIsAnErrorAndNotASilentFallback) {
  const absl::StatusOr<std::string> device = ChooseDevice("", Installation(kNoDriver, true));
  ASSERT_FALSE(device.ok());
  EXPECT_THAT(std::string(device.status().message()), HasSubstr("--device=emu:0"));
}

TEST(ChooseDevice, ATorchLibraryThatCannotBeLoadedIsNamed) {
  for (const char* requested : {"", "cuda:0"}) {
    const absl::StatusOr<std::string> device =
        ChooseDevice(requested, Installation(kOneDevice, true));
    ASSERT_FALSE(device.ok());
    EXPECT_THAT(std::string(device.status().message()),
                AllOf(HasSubstr("/no/torch/libtorch_cuda.so"), HasSubstr("--device=emu:0")));
  }
}

TEST(ChooseDevice, AnIndexBeyondTheDevicesIsRefusedWithTheirNumber) {
  const absl::StatusOr<std::string> device = ChooseDevice("cuda:1", Installation(kOneDevice, true));
  EXPECT_EQ(device.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(device.status().message()), HasSubstr("1 CUDA devices"));
}

TEST(ChooseDevice, TheEmulatedDeviceIsThereWhateverTheDriverSays) {
  EXPECT_EQ(*ChooseDevice("emu:0", Installation(kNoDriver, true)), "emu:0");
}

TEST(ChooseDevice, OtherNamesAreRefused) {
  for (const char* name : {"tpu:0", "cuda", "cuda:-1", "cuda:x", "emu:1"}) {
    EXPECT_EQ(ChooseDevice(name, Installation(kOneDevice, true)).status().code(),
              absl::StatusCode::kInvalidArgument)
        << name;
  }
}

}  // namespace
}  // namespace pinion
