// The transfer engine on CudaDevice over the fake runtime.

#include <algorithm>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/fence.h"
#include "pinion/device/cuda/cuda_device.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/tests/device/cuda/fake_cuda.h"
#include "pinion/tests/engine/engine_world.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace {

using ::pinion::testing::EngineWorld;
using ::pinion::testing::FakeCuda;
using ::pinion::testing::IsOk;
using ::pinion::testing::Pattern;
using ::pinion::testing::StatusIs;
using ::pinion::testing::TestMachineOptions;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr absl::Duration kLong = absl::Seconds(30);

class EngineOnCudaTest : public ::testing::Test {
 protected:
  EngineOnCudaTest()
      : fake_(TestMachineOptions()),
        world_(fake_.shared_machine(), std::make_shared<CudaDevice>(FakeCuda::Api(), 0), {}) {}

  FakeCuda fake_;
  EngineWorld world_;
};

TEST_F(EngineOnCudaTest, AStickyErrorPoisonsTheEngine) {
  uint8_t* const data = world_.AllocateDevice(100);
  const std::shared_ptr<HostBuffer> host = world_.NewHostBuffer(100);
  fake_.FailNext("MemcpyAsync", cudaErrorECCUncorrectable);
  EXPECT_THAT(world_.TryCopyIn(host, data, world_.compute()),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("cudaErrorECCUncorrectable")));
  const int copies = fake_.calls("MemcpyAsync");
  EXPECT_THAT(world_.TryCopyIn(host, data, world_.compute()),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("CopyAsync")));
  EXPECT_EQ(fake_.calls("MemcpyAsync"), copies);
}

// A copy whose call succeeds but which faults while it runs. The parameter is the number of later
// submissions that succeed before a call reports the fault.
class FaultingCopyTest : public EngineOnCudaTest, public ::testing::WithParamInterface<int> {};

TEST_P(FaultingCopyTest, PoisonsTheEngineWhenACallTellsAndItsHostBlockIsNotReused) {
  constexpr uint64_t kSize = 64 * kKiB;
  uint8_t* const data = world_.AllocateDevice(kSize);
  std::shared_ptr<HostBuffer> host = world_.NewHostBuffer(kSize);
  const uint8_t* const block = static_cast<const uint8_t*>(host->data());
  world_.WriteDevice(data, Pattern(1, kSize), world_.compute());
  fake_.FaultCopy(1, GetParam());

  const absl::StatusOr<Transfer> out = world_.TryCopyOut(host, data, world_.compute());
  const auto names_the_fault =
      StatusIs(absl::StatusCode::kInternal, HasSubstr("cudaErrorIllegalAddress"));
  if (out.ok()) {
    EXPECT_THAT(out->Wait(kLong), names_the_fault);
    EXPECT_FALSE(out->IsDone());
  } else {
    EXPECT_THAT(out.status(), names_the_fault);
  }
  EXPECT_THAT(world_.engine().health(), names_the_fault);
  const uint64_t calls = fake_.all_calls();
  EXPECT_THAT(world_.TryCopyIn(host, data, world_.compute()), names_the_fault);
  EXPECT_EQ(fake_.all_calls(), calls) << "a poisoned engine makes no call";

  host.reset();
  std::vector<std::shared_ptr<HostBuffer>> others;
  for (int i = 0; i < 16; ++i) {
    others.push_back(world_.NewHostBuffer(kSize));
    const uint8_t* const other = static_cast<const uint8_t*>(others.back()->data());
    EXPECT_TRUE(other + kSize <= block || block + kSize <= other) << "the block is used again";
  }
}

INSTANTIATE_TEST_SUITE_P(UnnoticedCalls, FaultingCopyTest, ::testing::Values(0, 1, 2, 3));

TEST_F(EngineOnCudaTest, ARecoverableErrorPoisonsNothing) {
  uint8_t* const data = world_.AllocateDevice(100);
  const std::shared_ptr<HostBuffer> host = world_.NewHostBuffer(100);
  for (const cudaError_t error : {cudaErrorMemoryAllocation, cudaErrorInvalidValue}) {
    fake_.FailNext("MemcpyAsync", error);
    EXPECT_FALSE(world_.TryCopyIn(host, data, world_.compute()).ok());
    EXPECT_THAT(world_.engine().health(), IsOk());
    EXPECT_EQ(FakeCuda::Api().GetLastError(), cudaSuccess);
  }
  const Transfer in = world_.CopyIn(host, data, world_.compute());
  EXPECT_THAT(in.Wait(kLong), IsOk());
}

// A program may destroy a stream whose work is done, so a fence may depend on its event only.
TEST_F(EngineOnCudaTest, AMarkIsDoneAfterItsStreamWasDestroyed) {
  for (const bool polled : {true, false}) {
    const StreamHandle stream = world_.NewStream();
    const absl::StatusOr<FenceTicket> ticket = world_.engine().Mark(stream);
    ASSERT_THAT(ticket, IsOk());
    ASSERT_THAT(world_.engine().device().SynchronizeStream(stream), IsOk());
    ASSERT_THAT(world_.engine().device().DestroyStream(stream), IsOk());
    const int asked = fake_.calls("StreamIsCapturing");
    if (polled) {
      ticket->timeline->Poll();
      EXPECT_TRUE(ticket->IsDone());
    } else {
      EXPECT_THAT(ticket->timeline->Wait(ticket->value, kLong), IsOk());
    }
    EXPECT_EQ(fake_.calls("StreamIsCapturing"), asked) << "the dead stream was asked";
  }
}

// A new stream gets the handle of a destroyed stream that still has work. Progress of the new
// stream must not complete the earlier mark: its block would be reused too early.
TEST_F(EngineOnCudaTest, AMarkOfADestroyedStreamIsNotDoneBecauseItsHandleIsUsedAgain) {
  fake_.RecycleStreamHandles();
  Device& device = world_.engine().device();
  const StreamHandle first = device.CreateStream("first").value();
  const Kernel kernel = {.name = "long", .reads = {}, .writes = {}, .flops = 1e16};
  ASSERT_THAT(fake_.machine().Launch(0, first, kernel), IsOk());
  const absl::StatusOr<FenceTicket> before = world_.engine().Mark(first);
  ASSERT_THAT(before, IsOk());
  ASSERT_THAT(device.DestroyStream(first), IsOk());
  const StreamHandle second = device.CreateStream("second").value();
  ASSERT_EQ(second, first);
  const absl::StatusOr<FenceTicket> after = world_.engine().Mark(second);
  ASSERT_THAT(after, IsOk());

  after->timeline->Poll();
  EXPECT_FALSE(before->IsDone());
  EXPECT_THAT(after->timeline->Wait(after->value, absl::Milliseconds(1)),
              StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("mark 1")));
  EXPECT_FALSE(before->IsDone());

  ASSERT_THAT(fake_.machine().SynchronizeDevice(0), IsOk());
  EXPECT_THAT(after->timeline->Wait(after->value, kLong), IsOk());
  EXPECT_TRUE(before->IsDone());
}

// A data loader may create its streams anew in each epoch.
TEST_F(EngineOnCudaTest, StreamsThatComeAndGoLeaveNothingInTheEngine) {
  Device& device = world_.engine().device();
  std::vector<std::weak_ptr<FenceTimeline>> timelines;
  for (int epoch = 0; epoch < 200; ++epoch) {
    const StreamHandle stream = device.CreateStream("epoch").value();
    timelines.push_back(world_.engine().Mark(stream)->timeline);
    ASSERT_THAT(device.SynchronizeStream(stream), IsOk());
    ASSERT_THAT(device.DestroyStream(stream), IsOk());
  }
  const auto live =
      std::ranges::count_if(timelines, [](const auto& one) { return !one.expired(); });
  EXPECT_LE(live, 65);
}

TEST_F(EngineOnCudaTest, AMarkOfTheStreamPerThreadIsRefused) {
  EXPECT_THAT(world_.engine().Mark(StreamHandle(cudaStreamPerThread)),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("cudaStreamPerThread")));
}

TEST_F(EngineOnCudaTest, MarksArePolledDuringACaptureWithoutSpoilingIt) {
  const StreamHandle stream = world_.NewStream();
  const absl::StatusOr<FenceTicket> ticket = world_.engine().Mark(stream);
  ASSERT_THAT(ticket, IsOk());
  fake_.SetCapturing(stream, true);
  ticket->timeline->Poll();
  EXPECT_TRUE(ticket->IsDone());
  EXPECT_FALSE(fake_.capture_spoiled());
}

// CUDA cannot tell what a stream waits for; the engine records the waits that it enqueues.
TEST(EngineOnStuckCudaTest, ATimeoutNamesWhatACopyWaitsFor) {
  EmulatedOptions machine = TestMachineOptions();
  machine.faults.stalls = {{.at = 1}};
  FakeCuda fake(machine);
  EngineOptions options;
  options.drain_timeout = absl::Milliseconds(20);
  EngineWorld world(fake.shared_machine(), std::make_shared<CudaDevice>(FakeCuda::Api(), 0),
                    options);
  uint8_t* const data = world.AllocateDevice(kMiB);
  const std::shared_ptr<HostBuffer> source = world.NewHostBuffer(kMiB);
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(kMiB);
  ASSERT_THAT(world.machine().Copy(0, data, source->data(), kMiB, world.compute()), IsOk());

  const Transfer out = world.CopyOut(host, data, world.compute());
  const Transfer in = world.CopyIn(host, data, world.NewStream());

  constexpr const char* kWaitsForCompute =
      "submission 1 (1 MiB, 1 piece) is not done: it has not started: it waits for the work that "
      "was on its compute stream when it was submitted";
  EXPECT_THAT(out.Wait(absl::Milliseconds(20)),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       AllOf(HasSubstr("D2H on cuda:0"), HasSubstr(kWaitsForCompute))));
  EXPECT_THAT(in.Wait(absl::Milliseconds(20)),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       AllOf(HasSubstr("H2D on cuda:0"), HasSubstr("it waits for D2H on cuda:0"),
                             HasSubstr(kWaitsForCompute))));
  EXPECT_THAT(world.engine().Shutdown(absl::Milliseconds(20)),
              StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr(kWaitsForCompute)));
}

}  // namespace
}  // namespace pinion
