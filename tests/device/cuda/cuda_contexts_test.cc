// Which device is current during and after a call of the CUDA device; on the fake runtime.

#include <string_view>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/device/cuda/cuda_api.h"
#include "pinion/device/device.h"
#include "pinion/tests/device/cuda/cuda_device_fixture.h"
#include "pinion/tests/device/cuda/fake_cuda.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace {

using ::pinion::testing::FakeCuda;
using ::pinion::testing::IsOk;
using ::pinion::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

using CudaContextsTest = testing::CudaDeviceFixture;

// A library's registration function left another device current, so later kernel launches went
// there (sglang#26568).
TEST_F(CudaContextsTest, NoCallLeavesAnotherDeviceCurrent) {
  for (const bool chosen : {false, true}) {
    SCOPED_TRACE(chosen ? "the thread chose device 0" : "the thread chose none");
    if (chosen) {
      ASSERT_EQ(FakeCuda::Api().SetDevice(0), cudaSuccess);
    }
    ASSERT_EQ(CurrentDevice(), 0);
    const StreamHandle stream = device_.CreateStream("s").value();
    EXPECT_EQ(CurrentDevice(), 0);
    void* const data = device_.Allocate(kMiB, stream).value();
    EXPECT_EQ(CurrentDevice(), 0);
    const HostSegment segment = device_.pinned_source()->Allocate(2 * kMiB).value();
    EXPECT_EQ(CurrentDevice(), 0);
    const CopyPiece piece = {data, segment.data, kMiB};
    EXPECT_THAT(device_.CopyAsync(CopyDirection::kHostToDevice, {&piece, 1}, stream), IsOk());
    EXPECT_EQ(CurrentDevice(), 0);
    EXPECT_THAT(device_.SynchronizeStream(stream), IsOk());
    EXPECT_THAT(device_.pinned_source()->Free(segment), IsOk());
    EXPECT_THAT(device_.Free(data, stream), IsOk());
    fake_.FailNext("EventCreateWithFlags", cudaErrorMemoryAllocation);
    EXPECT_FALSE(device_.CreateEvent().ok());
    EXPECT_EQ(CurrentDevice(), 0);
  }
}

TEST_F(CudaContextsTest, ADeviceThatIsCurrentAlreadyIsNotSetAgain) {
  ASSERT_EQ(FakeCuda::Api().SetDevice(1), cudaSuccess);
  const int calls = fake_.calls("SetDevice");
  EXPECT_THAT(device_.CreateEvent(), IsOk());
  EXPECT_EQ(fake_.calls("SetDevice"), calls);
}

// In LMCache a thread that pins opened a context on device 0 (LMCache#4018).
TEST_F(CudaContextsTest, AThreadThatNeverChoseADeviceGetsNoContextOnDeviceZero) {
  const StreamHandle stream = device_.CreateStream("s").value();
  const HostSegment segment = device_.pinned_source()->Allocate(2 * kMiB).value();
  EXPECT_THAT(device_.SynchronizeStream(stream), IsOk());
  EXPECT_THAT(device_.pinned_source()->Free(segment), IsOk());
  EXPECT_TRUE(fake_.has_context(1));
  EXPECT_FALSE(fake_.has_context(0));
  EXPECT_EQ(CurrentDevice(), 0);
}

TEST_F(CudaContextsTest, DescribingADeviceOpensNoContext) {
  EXPECT_NE(device_.info().model, "");
  EXPECT_FALSE(fake_.has_context(1));
}

// Some drivers do not expose the runtime's contexts.
TEST_F(CudaContextsTest, WithoutTheDriversCallsADeviceIsSelectedAndPutBack) {
  const EventHandle event = device_.CreateEvent().value();
  const int set = fake_.calls("SetDevice"), popped = fake_.calls("PopContext");
  fake_.FailNext("PushContext", cudaErrorNotSupported);
  EXPECT_THAT(device_.QueryEvent(event), IsOk());
  EXPECT_EQ(fake_.calls("SetDevice"), set + 2);
  EXPECT_EQ(fake_.calls("PopContext"), popped);
  EXPECT_EQ(CurrentDevice(), 0);
}

TEST_F(CudaContextsTest, ACallOnAnotherDeviceLeavesTheThreadsGreenContextCurrent) {
  const EventHandle event = device_.CreateEvent().value();
  ASSERT_EQ(FakeCuda::Api().SetDevice(0), cudaSuccess);
  fake_.SetGreenContext();
  EXPECT_THAT(device_.QueryEvent(event), IsOk());
  EXPECT_TRUE(FakeCuda::green_is_current());
  EXPECT_EQ(CurrentDevice(), 0);
}

TEST_F(CudaContextsTest, ADeviceThatCannotBeMadeCurrentIsNamedAndNothingIsPutBack) {
  const struct {
    const char* function;
    bool chosen;
    const char* what;
  } cases[] = {{"GetDevice", false, "cudaGetDevice"},
               {"PushContext", true, "making the context of cuda:1 current"},
               {"SetDevice", true, "cudaSetDevice(1)"}};
  for (const auto& [function, chosen, what] : cases) {
    SCOPED_TRACE(function);
    if (chosen) {
      ASSERT_EQ(FakeCuda::Api().SetDevice(0), cudaSuccess);
    }
    const int set = fake_.calls("SetDevice");
    const bool selects = std::string_view(function) == "SetDevice";
    if (selects) fake_.FailNext("PushContext", cudaErrorNotSupported);
    fake_.FailNext(function, cudaErrorDevicesUnavailable);
    EXPECT_THAT(device_.CreateEvent(),
                StatusIs(absl::StatusCode::kUnavailable,
                         AllOf(HasSubstr(what), HasSubstr("cudaErrorDevicesUnavailable"))));
    EXPECT_EQ(fake_.calls("EventCreateWithFlags"), 0);
    EXPECT_EQ(fake_.calls("PopContext"), 0);
    EXPECT_EQ(fake_.calls("SetDevice"), set + (selects ? 1 : 0));
    EXPECT_EQ(LatchedError(), cudaSuccess);
  }
}

TEST_F(CudaContextsTest, AStreamOutlivesTheGreenContextThatWasCurrentWhenItWasCreated) {
  ASSERT_EQ(FakeCuda::Api().SetDevice(1), cudaSuccess);
  fake_.SetGreenContext();
  EXPECT_THAT(device_.CreateStream("s"), IsOk());
  EXPECT_EQ(fake_.green_streams(), 0u);
}

TEST_F(CudaContextsTest, AnEventIsRecordedOnAStreamWhicheverContextWasCurrentWhenTheyWereCreated) {
  ASSERT_EQ(FakeCuda::Api().SetDevice(1), cudaSuccess);
  const StreamHandle before = device_.CreateStream("before").value();
  const EventHandle event_before = device_.CreateEvent().value();
  fake_.SetGreenContext();
  const StreamHandle after = device_.CreateStream("after").value();
  for (const EventHandle event :
       {event_before, device_.CreateEvent().value(), device_.CreateTimedEvent().value()}) {
    EXPECT_THAT(device_.RecordEvent(event, before), IsOk());
    EXPECT_THAT(device_.RecordEvent(event, after), IsOk());
  }
}

// Drivers without green contexts lack these functions.
TEST_F(CudaContextsTest, WithoutTheDriversFunctionsStreamsAreCreatedAllTheSame) {
  ASSERT_EQ(FakeCuda::Api().SetDevice(1), cudaSuccess);
  fake_.FailNext("PushContext", cudaErrorNotSupported);
  EXPECT_THAT(device_.CreateStream("s"), IsOk());
  EXPECT_EQ(fake_.calls("PopContext"), 0);
}

}  // namespace
}  // namespace pinion
