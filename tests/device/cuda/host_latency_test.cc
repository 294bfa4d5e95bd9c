#include "pinion/device/cuda/host_latency.h"

#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/tests/device/cuda/fake_cuda.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace {

using ::pinion::testing::FakeCuda;
using ::pinion::testing::StatusIs;
using ::testing::HasSubstr;

TEST(HostLatencyTest, ADeviceThatRunsNoKernelsSaysSoAndKeepsNothing) {
  FakeCuda fake{EmulatedOptions()};
  EXPECT_THAT(MeasureHostLatencyNs(FakeCuda::Api(), 0),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("cudaErrorNotSupported")));
  EXPECT_EQ(fake.live_handles(), 0u);
  EXPECT_EQ(fake.live_segments(), 0u);
  EXPECT_EQ(FakeCuda::Api().GetLastError(), cudaSuccess);
}

TEST(HostLatencyTest, NoReadsAreRefused) {
  FakeCuda fake{EmulatedOptions()};
  EXPECT_THAT(MeasureHostLatencyNs(FakeCuda::Api(), 0, 0),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("reads is 0")));
}

TEST(HostLatencyTest, TheKernelAssemblesForTheGpusOfToday) {
  constexpr char kPtxas[] = "/usr/local/cuda/bin/ptxas";
  if (access(kPtxas, X_OK) != 0) GTEST_SKIP() << "no " << kPtxas;
  const std::string file = ::testing::TempDir() + "/host_latency.ptx";
  std::ofstream(file) << kHostLatencyPtx;
  for (const std::string arch : {"sm_80", "sm_90", "sm_100"}) {
    const std::string command =
        std::string(kPtxas) + " -arch=" + arch + " " + file + " -o /dev/null";
    EXPECT_EQ(std::system(command.c_str()), 0) << command;
  }
}

}  // namespace
}  // namespace pinion
