#include "pinion/bench/host_latency.h"

#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/tests/device/cuda/fake_cuda.h"
#include "pinion/tests/support/run_program.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace {

using ::pinion::testing::FakeCuda;
using ::pinion::testing::IsOkAndHolds;
using ::pinion::testing::RunVisibly;
using ::pinion::testing::StatusIs;
using ::testing::AnyOf;
using ::testing::DoubleNear;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(HostLatencyTest, ADeviceThatRunsNoKernelsSaysSoAndKeepsNothing) {
  FakeCuda fake{EmulatedOptions()};
  EXPECT_THAT(MeasureHostLatencyNs(FakeCuda::Api(), 0),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("cudaErrorNotSupported")));
  EXPECT_EQ(fake.live_handles(), 0u);
  EXPECT_EQ(fake.live_segments(), 0u);
  EXPECT_EQ(FakeCuda::Api().GetLastError(), cudaSuccess);
}

// Runs a host version of kHostLatencyPtx on an emulated machine where a read takes 500 ns and a
// host call no time.
class HostLatencyKernelTest : public ::testing::Test {
 protected:
  HostLatencyKernelTest() : fake_(Options()) {
    fake_.SetKernel(
        [this](void** arguments, StreamHandle stream) { return Chase(arguments, stream); });
  }

  static EmulatedOptions Options() {
    EmulatedOptions options;
    options.device_count = 2;
    options.preset.launch_us = 0;
    options.preset.host_call_us = 0;
    options.preset.host_event_us = 0;
    options.preset.memory_gb_per_s = 1;
    return options;
  }

  cudaError_t Chase(void** arguments, StreamHandle stream) {
    void* node = *static_cast<void**>(arguments[0]);
    const uint64_t reads = *static_cast<uint64_t*>(arguments[1]);
    nodes_.clear();
    for (uint64_t i = skipped_; i < reads; ++i) {
      nodes_.insert(node);
      void* const next = *static_cast<void**>(node);
      if (static_cast<char*>(next) - static_cast<char*>(node) == 128) ++in_order_;
      node = next;
    }
    void** const last = *static_cast<void***>(arguments[2]);
    EXPECT_TRUE(fake_.machine().IsPinned(last));
    *last = node;
    Kernel kernel;
    kernel.name = "chase";
    kernel.memory_bytes = static_cast<double>(reads) * 500;
    launches_.push_back(reads);
    return fake_.machine().Launch(FakeCuda::thread().device(), stream, kernel).ok()
               ? cudaSuccess
               : cudaErrorInvalidValue;
  }

  FakeCuda fake_;
  uint64_t skipped_ = 0;
  std::set<void*> nodes_;  // nodes that the last launch has read
  uint64_t in_order_ = 0;  // reads of the next adjacent node, which a prefetcher would guess
  std::vector<uint64_t> launches_;
};

TEST_F(HostLatencyKernelTest, AReadTakesWhatTheDevicesClockSaysOverTheirNumber) {
  EXPECT_THAT(MeasureHostLatencyNs(FakeCuda::Api(), 1, 20'000), IsOkAndHolds(DoubleNear(500, 0.1)));
  EXPECT_THAT(launches_, ElementsAre(16'384, 20'000)) << "every node once, before the clock runs";
  EXPECT_EQ(nodes_.size(), 16'384u) << "one circle";
  EXPECT_EQ((reinterpret_cast<uintptr_t>(*nodes_.rbegin()) -
             reinterpret_cast<uintptr_t>(*nodes_.begin())) /
                16'383,
            128u);
  EXPECT_LT(in_order_, 100u);
  EXPECT_EQ(fake_.live_handles(), 0u);
  EXPECT_EQ(fake_.live_segments(), 0u);
}

TEST_F(HostLatencyKernelTest, AChaseThatEndsElsewhereIsAnError) {
  skipped_ = 1;
  EXPECT_THAT(MeasureHostLatencyNs(FakeCuda::Api(), 1, 100),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("wrong word")));
}

TEST_F(HostLatencyKernelTest, WhicheverCallFailsItIsReportedAndNothingIsKept) {
  for (uint64_t k = 1;; ++k) {
    const size_t handles = fake_.live_handles(), segments = fake_.live_segments();
    fake_.FailCall(k, cudaErrorDevicesUnavailable);
    const absl::StatusOr<double> ns = MeasureHostLatencyNs(FakeCuda::Api(), 1, 100);
    const std::string failed = fake_.failed_function();
    if (failed.empty()) break;
    SCOPED_TRACE(std::to_string(k) + ", " + failed);
    if (ns.ok()) {
      EXPECT_GT(k, 1u) << "it went to another device";
      // A failed release cannot be handled, and the calls for memory placement are optional.
      // GetDevice is the first call of each of them.
      EXPECT_THAT(failed, AnyOf("GetDevice", "EventDestroy", "StreamDestroy", "FreeHost",
                                "LibraryUnload", "HasContext", "SetDevice", "PushContext",
                                "PopContext", "DeviceGetPCIBusId", "DeviceGetAttribute"));
    } else {
      EXPECT_THAT(ns, StatusIs(absl::StatusCode::kUnavailable));
      EXPECT_EQ(fake_.live_handles(), handles);
      EXPECT_EQ(fake_.live_segments(), segments);
    }
    fake_.ForgetFailedCall();
    FakeCuda::thread() = FakeCuda::ThreadState();
  }
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
    EXPECT_EQ(RunVisibly(command), 0) << command;
  }
}

}  // namespace
}  // namespace pinion
