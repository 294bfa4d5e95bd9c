// Checks a training step on the files that a GPU uses. LibTorch computes on the emulated device;
// the session calls device/cuda, and that a fake runtime on the same machine. Gradients equal those
// without offload, bit by bit. If any call of the runtime fails, the step still gives these
// gradients, or raises an error that names the call.

#include <ATen/Parallel.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/device/cuda/cuda_api.h"
#include "pinion/device/cuda/cuda_device.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/hooks/emulated/emu_device.h"
#include "pinion/tests/device/cuda/fake_cuda.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/error_of.h"
#include "pinion/tests/hooks/support/test_net.h"
#include "pinion/tests/support/captured_log.h"

namespace pinion::testing {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

NetShape Tiny() {
  NetShape shape;
  shape.layers = 1;
  shape.batch = 1;
  shape.tokens = 8;
  return shape;
}

// A machine on which LibTorch computes, and a CUDA runtime on top of it.
class CudaWorld {
 public:
  CudaWorld() : CudaWorld(EmulatedMachine::Create(MachineOptions()).value()) {
    at::set_num_threads(1);
    absl::Status registered;
    PINION_CHECK(Soon([&] {
      registered = RegisterEmuDevice(fake_.shared_machine());
      return registered.ok();
    })) << registered;
  }
  // Uses a machine that is already registered.
  explicit CudaWorld(std::shared_ptr<EmulatedMachine> machine) : fake_(std::move(machine)) {}

  FakeCuda& fake() { return fake_; }
  c10::Device device() const { return c10::Device(c10::DeviceType::PrivateUse1, 0); }

  std::shared_ptr<OffloadSession> NewSession() {
    OffloadOptions options = SmallWindows(2 * kKiB);
    options.allocator.segment_bytes = 2 * kMiB;
    options.min_offload_bytes = 64;
    const auto open = [callers = callers_](int index) {
      const auto device = std::make_shared<CudaDevice>(FakeCuda::Api(), index);
      callers->insert(callers->end(), {device, device->pinned_source()});
      return absl::StatusOr<std::shared_ptr<Device>>(device);
    };
    return OffloadSession::Create(options, OwnBackend(open)).value();
  }

  // Drops the session and waits until nothing calls the runtime: autograd's workers release the
  // graph later than the session ends.
  void Drop(std::shared_ptr<OffloadSession>& session) {
    session.reset();
    EXPECT_TRUE(Soon([&] {
      return std::all_of(callers_->begin(), callers_->end(),
                         [](const auto& caller) { return caller.expired(); });
    }));
  }

  uint64_t device_bytes() { return fake_.machine().memory_stats(0).in_use_bytes; }

 private:
  FakeCuda fake_;
  // Callers of all sessions.
  const std::shared_ptr<std::vector<std::weak_ptr<void>>> callers_ =
      std::make_shared<std::vector<std::weak_ptr<void>>>();
};

bool Quiet(const std::shared_ptr<OffloadSession>& session) {
  return Soon([&] { return session->GetStats().live_handles == 0; });
}

// --- A copy that fails while it runs. Each test has its own process, since the leak keeps the
// machine. Death tests run first: children of fork() can run backward only if their parent never
// has. ---

enum ExitCode { kAsItShould = 0, kNoSuchCopy = 10, kWrongGradient, kVagueError };

[[noreturn]] void TrainWithAFaultingCopy(uint64_t copy, int unnoticed_calls) {
  CudaWorld world;
  const TestNet net(world.device(), at::kFloat, Tiny());
  const Gradients plain = TrainStep(net, nullptr);
  const std::shared_ptr<OffloadSession> session = world.NewSession();
  world.fake().FaultCopy(copy, unnoticed_calls);
  try {
    const Gradients gradients = TrainStep(net, session);
    if (world.fake().failed_function().empty()) _exit(kNoSuchCopy);
    _exit(SameGradients(plain, gradients) ? kAsItShould : kWrongGradient);
  } catch (const c10::Error& error) {
    const std::string what = error.what();
    const bool clear = what.find("cudaErrorIllegalAddress") != std::string::npos ||
                       what.find("a copy faulted while it ran") != std::string::npos;
    _exit(clear ? kAsItShould : kVagueError);
  }
}

class CudaPathDeathTest : public ::testing::TestWithParam<int> {};

TEST_P(CudaPathDeathTest, AnyCopyOfAStepMayFaultWhileItRuns) {
  if (TestsRunOnGpu()) GTEST_SKIP() << "is about the fake runtime's faults";
  GTEST_FLAG_SET(death_test_style, "fast");
  int exit_code = kAsItShould;
  uint64_t copies = 0;
  while (exit_code == kAsItShould) {
    const uint64_t copy = copies + 1;
    EXPECT_EXIT(
        TrainWithAFaultingCopy(copy, GetParam()),
        [&exit_code](int status) {
          exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
          return exit_code == kAsItShould || exit_code == kNoSuchCopy;
        },
        "")
        << "copy " << copy << ", exit code " << exit_code;
    ++copies;
  }
  EXPECT_GT(copies, 8u) << "the step made too few copies for this to mean much";
}

INSTANTIATE_TEST_SUITE_P(UnnoticedCalls, CudaPathDeathTest, ::testing::Values(0, 2));

// --- Steps ---

TEST(CudaPathTest, GradientsAreBitwiseTheSameAndNothingIsLeft) {
  CudaWorld world;
  const TestNet net(world.device(), at::kFloat, {});
  const Gradients plain = TrainStep(net, nullptr);
  const uint64_t device_bytes = world.device_bytes();
  std::shared_ptr<OffloadSession> session = world.NewSession();
  for (int step = 0; step < 3; ++step) ExpectSameGradients(plain, TrainStep(net, session));
  ASSERT_TRUE(Quiet(session));
  EXPECT_GT(session->GetStats().evicted_bytes, 0u);
  EXPECT_GT(session->GetStats().prefetch_hits, 0u);
  world.Drop(session);
  EXPECT_EQ(world.fake().live_handles(), 0u);
  EXPECT_EQ(world.fake().live_segments(), 0u);
  EXPECT_EQ(world.device_bytes(), device_bytes);
}

// --- Fail the k-th call, for every k ---

// A step without failures: its gradients and number of calls.
struct Undisturbed {
  Gradients gradients;
  uint64_t calls = 0;
};

Undisturbed TrainUndisturbed() {
  CudaWorld world;
  const TestNet net(world.device(), at::kFloat, Tiny());
  Undisturbed step;
  step.gradients = TrainStep(net, nullptr);
  std::shared_ptr<OffloadSession> session = world.NewSession();
  ExpectSameGradients(step.gradients, TrainStep(net, session));
  EXPECT_TRUE(Quiet(session));
  world.Drop(session);
  step.calls = world.fake().all_calls();
  return step;
}

// Runs a step whose k-th call fails. Returns the raised error, or "no error".
std::string StepWithAFailure(CudaWorld& world, const TestNet& net, const Gradients& plain,
                             uint64_t k, cudaError_t failure) {
  std::shared_ptr<OffloadSession> session = world.NewSession();
  world.fake().FailCall(k, failure);
  const std::string raised = ErrorOf([&] {
    EXPECT_TRUE(SameGradients(plain, TrainStep(net, session))) << "a wrong gradient, and no error";
  });
  EXPECT_THAT(raised, AnyOf("no error", AllOf(HasSubstr(cudaGetErrorName(failure)),
                                              HasSubstr("cuda" + world.fake().failed_function()))));
  for (const at::Tensor& parameter : net.parameters()) parameter.mutable_grad().reset();
  EXPECT_TRUE(Quiet(session));
  EXPECT_EQ(session->GetAllocatorStats().booked_bytes.current, 0u);
  world.Drop(session);
  return raised;
}

class CudaPathFailures : public ::testing::TestWithParam<cudaError_t> {};

TEST_P(CudaPathFailures, WhicheverCallFailsNothingIsLost) {
  const Undisturbed undisturbed = TrainUndisturbed();
  ASSERT_GT(undisturbed.calls, 100u);
  const CapturedLog log;  // which would report many leaks
  int errors = 0;
  for (uint64_t k = 1; k <= undisturbed.calls && !HasFailure(); ++k) {
    CudaWorld world;
    const TestNet net(world.device(), at::kFloat, Tiny());
    const uint64_t device_bytes = world.device_bytes();
    const std::string raised = StepWithAFailure(world, net, undisturbed.gradients, k, GetParam());
    const std::string failed = world.fake().failed_function();
    SCOPED_TRACE("call " + std::to_string(k) + ", " + failed);
    errors += raised != "no error";
    // A failed release call leaks one object.
    const bool gives_back = failed == "StreamDestroy" || failed == "EventDestroy" ||
                            failed == "FreeHost" || failed == "GetDevice";
    const uint64_t may_stay = gives_back ? 1 : 0;
    // Autograd's workers release the last tensors shortly after backward has thrown.
    EXPECT_TRUE(Soon([&] {
      return world.fake().live_handles() <= may_stay && world.fake().live_segments() <= may_stay &&
             world.device_bytes() == device_bytes;
    })) << world.fake().live_handles()
        << " streams and events, " << world.fake().live_segments() << " pinned segments and "
        << world.device_bytes() - device_bytes << " bytes of the device are left";
    EXPECT_EQ(FakeCuda::Api().GetLastError(), cudaSuccess) << "left for somebody else to find";
  }
  RecordProperty("calls", static_cast<int>(undisturbed.calls));
  RecordProperty("errors", errors);
}

INSTANTIATE_TEST_SUITE_P(Kinds, CudaPathFailures,
                         ::testing::Values(cudaErrorDevicesUnavailable, cudaErrorMemoryAllocation),
                         [](const auto& info) { return cudaGetErrorName(info.param); });

// Deliberate leaks keep the machine from being replaced, so all runs share one and come last.
class CudaPathStickyFailures : public ::testing::TestWithParam<cudaError_t> {};

TEST_P(CudaPathStickyFailures, WhicheverCallFailsForGoodTheErrorNamesIt) {
  const Undisturbed undisturbed = TrainUndisturbed();
  std::shared_ptr<EmulatedMachine> machine = EmulatedMachine::Create(MachineOptions()).value();
  ASSERT_TRUE(Soon([&] { return RegisterEmuDevice(machine).ok(); }));
  const TestNet net(c10::Device(c10::DeviceType::PrivateUse1, 0), at::kFloat, Tiny());
  const CapturedLog log;  // which would report many leaks
  int errors = 0;
  for (uint64_t k = 1; k <= undisturbed.calls && !HasFailure(); ++k) {
    SCOPED_TRACE("call " + std::to_string(k));
    CudaWorld world(machine);
    errors += StepWithAFailure(world, net, undisturbed.gradients, k, GetParam()) != "no error";
  }
  EXPECT_GT(errors, 0);
  RecordProperty("errors", errors);
}

INSTANTIATE_TEST_SUITE_P(Kinds, CudaPathStickyFailures,
                         ::testing::Values(cudaErrorECCUncorrectable),
                         [](const auto& info) { return cudaGetErrorName(info.param); });

}  // namespace
}  // namespace pinion::testing
