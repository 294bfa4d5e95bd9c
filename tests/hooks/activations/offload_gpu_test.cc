// Checks on a real GPU what the emulated device and the fake runtime cannot show: large tensors,
// captures of CUDA graphs, a broken context, exit during copies, and pin_memory(). Without a GPU,
// tests are skipped with a reason; PINION_TEST_DEVICE=fake_cuda runs those that need no real CUDA.

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randn.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/cuda/cuda_backend.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/pin_memory/torch_host_allocator.h"
#include "pinion/tests/hooks/activations/offload_fixture.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/hooks/support/test_net.h"

namespace pinion::testing {
namespace {

bool OnGpu(const EmuWorld& world) { return world.device().is_cuda(); }

class OffloadGpuTest : public ::testing::Test {
 protected:
  void SetUp() override { setenv("PINION_TEST_DEVICE", "cuda:0", /*overwrite=*/0); }
};

using OffloadGpuDeathTest = OffloadGpuTest;

// --- What ends the process: each in a process of its own ---

enum ExitCode { kAsItShould = 0, kNoError = 10, kVagueError = 11, kCannotRun = 12 };

// After an illegal access in a kernel, every call of the context fails. Backward must report that,
// without a hang or a gradient.
[[noreturn]] void TrainAfterAnIllegalAccess() {
  EmuWorld world;
  if (!OnGpu(world)) _exit(kCannotRun);
  const TestNet net(world.device(), at::kFloat);
  const at::Tensor ten = at::arange(10, at::TensorOptions(world.device()));
  const at::Tensor loss = InScope(world.session(), [&] { return net.Loss(); });
  try {
    ten.index_select(0, ten.add(1 << 20).to(at::kLong));
    loss.backward();
    static_cast<void>(TakeGradients(net, loss));
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
    _exit(std::string(error.what()).find("CUDA") != std::string::npos ? kAsItShould : kVagueError);
  }
  _exit(kNoError);
}

TEST_F(OffloadGpuDeathTest, AnIllegalAccessIsAnErrorOfBackward) {
  if (const absl::Status gpu = CudaDeviceCount().status(); !gpu.ok()) GTEST_SKIP() << gpu;
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(TrainAfterAnIllegalAccess(), ::testing::ExitedWithCode(kAsItShould), "");
}

// Calls exit() during a step, like sys.exit() or a signal handler.
[[noreturn]] void ExitInTheMiddleOfAStep() {
  // Statics are destroyed in exit(), after main.
  static std::unique_ptr<EmuWorld>& world = *new std::unique_ptr<EmuWorld>(new EmuWorld());
  static at::Tensor loss;
  static std::vector<at::Tensor> seen;
  const TestNet net(world->device(), at::kFloat);
  {
    const OffloadScope scope(world->session());
    loss = net.Loss();
    // More than can be copied before exit().
    const auto floats = static_cast<int64_t>((OnGpu(*world) ? kGiB : 2 * kMiB) / 4);
    const at::Tensor carrier = NewCarrier(*world);
    for (int i = 0; i < 4; ++i) loss = Observe(loss, {Activation(carrier, {floats}, i)}, &seen);
  }
  if (world->session()->GetEngineStats(0).d2h.in_flight_bytes == 0) _exit(kNoError);
  std::exit(kAsItShould);
}

TEST_F(OffloadGpuDeathTest, AProcessMayExitWithCopiesInFlight) {
  if (std::string(std::getenv("PINION_TEST_DEVICE")) == "cuda:0") {
    if (const absl::Status gpu = CudaDeviceCount().status(); !gpu.ok()) GTEST_SKIP() << gpu;
  }
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(ExitInTheMiddleOfAStep(), ::testing::ExitedWithCode(kAsItShould), "");
}

// --- Steps ---

TEST_F(OffloadGpuTest, TensorsAboveEveryWindowComeBack) {
  OffloadOptions options = SmallWindows();
  options.allocator.segment_bytes = kGiB;
  EmuWorld world(MachineOptions(), options);
  const int64_t floats = static_cast<int64_t>((OnGpu(world) ? 512 * kMiB : 2 * kMiB) / 4);
  const at::Tensor carrier = NewCarrier(world);
  std::vector<at::Tensor> seen;
  const at::Tensor y = InScope(world.session(), carrier, [&](at::Tensor& y) {
    for (int i = 0; i < 4; ++i) y = Observe(y, {Activation(carrier, {floats}, i)}, &seen);
  });
  y.backward();
  // Backward visits the nodes from last to first; each Observe keeps what it saw last.
  ASSERT_EQ(seen.size(), 1u);
  EXPECT_TRUE(SameBytes(seen[0].cpu(), ActivationValues({floats}, 0)));
  const OffloadStats stats = world.QuietStats();
  EXPECT_GE(stats.offloaded_bytes, 4 * 4 * static_cast<uint64_t>(floats));
  EXPECT_GE(stats.evicted_bytes, 3 * 4 * static_cast<uint64_t>(floats));
}

// --- Graphs ---

// A captured forward keeps what backward needs, and the graph can be launched.
TEST_F(OffloadGpuTest, AStreamThatCapturesAGraphPassesThrough) {
  EmuWorld world;
  if (!OnGpu(world)) GTEST_SKIP() << "captures a real graph";
  const at::Tensor carrier = NewCarrier(world);
  const at::Tensor saved = Activation(carrier, {1024, 1024});
  std::vector<at::Tensor> seen;
  Observe(carrier, {saved}, &seen).backward();  // fills the memory cache
  const c10::Stream stream = world.NewStream();
  const auto native = static_cast<cudaStream_t>(NativeStream(stream).native());
  ASSERT_TRUE(world.Synchronize().ok());
  cudaGraph_t graph = nullptr;
  {
    const c10::StreamGuard guard(stream);
    const at::Tensor once_more = Observe(carrier, {saved}, &seen);  // fills the stream's cache
    ASSERT_EQ(cudaStreamBeginCapture(native, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    {
      const OffloadScope scope(world.session());
      at::Tensor y = Observe(carrier, {saved}, &seen);
      ASSERT_EQ(cudaStreamEndCapture(native, &graph), cudaSuccess);
      EXPECT_EQ(world.session()->GetStats().kept_capturing, 1u);
    }
  }
  ASSERT_NE(graph, nullptr);
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  EXPECT_EQ(cudaGraphLaunch(executable, native), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(native), cudaSuccess);
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
}

// A capture in the strictest mode forbids "unsafe" calls to all threads that did not relax their
// mode. Pack must make none.
TEST_F(OffloadGpuTest, PackSpoilsNoCaptureOfAnotherStream) {
  EmuWorld world;
  if (!OnGpu(world)) GTEST_SKIP() << "captures a real graph";
  const at::Tensor carrier = NewCarrier(world);
  const at::Tensor saved = Activation(carrier, {1024, 1024});
  std::vector<at::Tensor> seen;
  for (int i = 0; i < 2; ++i) {  // pins and caches the memory
    at::Tensor y = InScope(world.session(), [&] { return Observe(carrier, {saved}, &seen); });
    y.backward();
  }
  ASSERT_TRUE(world.Synchronize().ok());
  const uint64_t offloaded = world.session()->GetStats().offloaded;
  const auto other = static_cast<cudaStream_t>(NativeStream(world.NewStream()).native());
  ASSERT_EQ(cudaStreamBeginCapture(other, cudaStreamCaptureModeGlobal), cudaSuccess);
  const at::Tensor y = InScope(world.session(), [&] { return Observe(carrier, {saved}, &seen); });
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(other, &graph), cudaSuccess) << "the capture was spoiled";
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_GT(world.session()->GetStats().offloaded, offloaded);
  y.backward();
  EXPECT_TRUE(SameBytes(seen[0].cpu(), ActivationValues({1024, 1024})));
  if (graph != nullptr) cudaGraphDestroy(graph);
}

// --- pin_memory(): the last, since the allocator stays ---

TEST_F(OffloadGpuTest, PinMemoryIsPinionsAndCopiesFromItAreRight) {
  EmuWorld world;
  if (!OnGpu(world)) GTEST_SKIP() << "pins for CUDA";
  // Must equal the options of the session's tier, which exists already.
  const AllocatorOptions options = SmallWindows().allocator;
  const absl::Status installed = InstallTorchHostAllocator(options, CudaBackend());
  ASSERT_TRUE(installed.ok()) << installed;
  const at::Tensor host = at::randn({1 << 20}).pin_memory();
  EXPECT_TRUE(host.is_pinned());
  cudaPointerAttributes attributes = {};
  ASSERT_EQ(cudaPointerGetAttributes(&attributes, host.const_data_ptr()), cudaSuccess);
  EXPECT_EQ(attributes.type, cudaMemoryTypeHost);
  const at::Tensor device = host.to(world.device(), /*non_blocking=*/true);
  EXPECT_TRUE(SameBytes(device.cpu(), host));
  EXPECT_GE(TorchHostAllocatorStats("cuda").value().booked_bytes.current, uint64_t{4} << 20);
}

}  // namespace
}  // namespace pinion::testing
