// The CUDA device, on the fake runtime, while a stream captures a graph.

#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/device/cuda/cuda_api.h"
#include "pinion/device/cuda/cuda_device.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/tests/device/cuda/cuda_device_fixture.h"
#include "pinion/tests/device/cuda/fake_cuda.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace {

using ::pinion::testing::FakeCuda;
using ::pinion::testing::IsOk;
using ::pinion::testing::IsOkAndHolds;

using CudaCapturesTest = testing::CudaDeviceFixture;

EmulatedOptions TwoDevices() {
  EmulatedOptions options;
  options.device_count = 2;
  options.memory_bytes = 64 * kMiB;
  return options;
}

TEST_F(CudaCapturesTest, TheLegacyStreamCapturesWhileAStreamThatSynchronisesWithItDoes) {
  EXPECT_THAT(device_.IsCapturing(StreamHandle(nullptr)), IsOkAndHolds(false));
  fake_.SetBlockingStreamCaptures();
  EXPECT_THAT(device_.IsCapturing(StreamHandle(nullptr)), IsOkAndHolds(true));
  EXPECT_EQ(LatchedError(), cudaSuccess);
  EXPECT_FALSE(fake_.capture_spoiled());
}

TEST_F(CudaCapturesTest, QueriesAndPinningDoNotSpoilSomebodysCapture) {
  const StreamHandle stream = device_.CreateStream("s").value();
  const EventHandle event = device_.CreateEvent().value();
  ASSERT_THAT(device_.RecordEvent(event, stream), IsOk());
  const StreamHandle captured = device_.CreateStream("captured").value();
  fake_.SetCapturing(captured, true);

  EXPECT_THAT(device_.IsCapturing(captured), IsOkAndHolds(true));
  EXPECT_THAT(device_.QueryEvent(event), IsOk());
  EXPECT_FALSE(device_.ElapsedMs(event, event).ok()) << "it has no timing";
  const absl::StatusOr<HostSegment> segment = device_.pinned_source()->Allocate(2 * kMiB);
  ASSERT_THAT(segment, IsOk());
  EXPECT_THAT(device_.pinned_source()->Free(*segment), IsOk());

  EXPECT_FALSE(fake_.capture_spoiled());
  // The thread's capture mode is restored: an unrelaxed query still fails.
  EXPECT_EQ(FakeCuda::Api().EventQuery(static_cast<cudaEvent_t>(event.native())),
            cudaErrorStreamCaptureUnsupported);
}

// A session may be created while another stream captures in the "global" mode.
TEST_F(CudaCapturesTest, SettingUpDoesNotSpoilSomebodysCapture) {
  fake_.SetCapturing(device_.CreateStream("captured").value(), true);
  const StreamHandle stream = device_.CreateStream("s").value();
  for (const absl::StatusOr<EventHandle>& event :
       {device_.CreateEvent(), device_.CreateTimedEvent()}) {
    ASSERT_THAT(event, IsOk());
    EXPECT_THAT(device_.DestroyEvent(*event), IsOk());
  }
  EXPECT_THAT(device_.Free(device_.Allocate(kMiB, stream).value(), stream), IsOk());
  EXPECT_FALSE(device_.Allocate(kGiB, stream).ok()) << "the device has less";
  EXPECT_THAT(device_.DestroyStream(stream), IsOk());
  EXPECT_FALSE(fake_.capture_spoiled());
}

// The first call of a device creates its context, of a thread's current device as well.
TEST(CudaContextDuringACaptureTest, ADevicesFirstCallDoesNotSpoilSomebodysCapture) {
  for (const char* const missing : {"", "PushContext"}) {  // a function of the driver
    const struct {
      const char* name;
      std::function<absl::Status(CudaDevice& device)> call;
    } rows[] = {
        {"IsCapturing",
         [](CudaDevice& device) { return device.IsCapturing(StreamHandle(nullptr)).status(); }},
        {"CreateStream", [](CudaDevice& device) { return device.CreateStream("s").status(); }},
        {"CreateEvent", [](CudaDevice& device) { return device.CreateEvent().status(); }},
        {"pinning",
         [](CudaDevice& device) { return device.pinned_source()->Allocate(2 * kMiB).status(); }},
    };
    for (const auto& [name, call] : rows) {
      for (const int index : {0, 1}) {  // 0 is current
        SCOPED_TRACE(absl::StrCat(name, missing, index));
        FakeCuda fake(TwoDevices());
        CudaDevice captured(FakeCuda::Api(), 1 - index), device(FakeCuda::Api(), index);
        fake.SetCapturing(captured.CreateStream("captured").value(), true);
        ASSERT_FALSE(fake.has_context(index));
        fake.FailNext(missing, cudaErrorNotSupported);
        EXPECT_THAT(call(device), IsOk());
        EXPECT_TRUE(fake.has_context(index));
        EXPECT_FALSE(fake.capture_spoiled());
        EXPECT_EQ(FakeCuda::thread().capture_mode, cudaStreamCaptureModeGlobal);
      }
    }
  }
}

// Without the driver's functions, cudaSetDevice returns to the thread's own device.
TEST(CudaContextDuringACaptureTest, TheWayBackToADeviceWithoutAContextSpoilsNoCapture) {
  FakeCuda fake(TwoDevices());
  CudaDevice device(FakeCuda::Api(), 1);
  const StreamHandle stream = device.CreateStream("s").value();
  const EventHandle event = device.CreateEvent().value();
  fake.SetCapturing(device.CreateStream("captured").value(), true);
  ASSERT_FALSE(fake.has_context(0));
  fake.FailNext("PushContext", cudaErrorNotSupported);
  EXPECT_THAT(device.RecordEvent(event, stream), IsOk());
  EXPECT_TRUE(fake.has_context(0));
  EXPECT_FALSE(fake.capture_spoiled());
}

// If the first exchange of the mode fails, a second one would leave the thread relaxed.
TEST_F(CudaCapturesTest, AThreadWhoseModeCouldNotBeRelaxedIsLeftAsItWas) {
  const EventHandle event = device_.CreateEvent().value();
  fake_.FailNext("ThreadExchangeStreamCaptureMode", cudaErrorDevicesUnavailable);
  EXPECT_THAT(device_.QueryEvent(event), IsOk());
  EXPECT_EQ(FakeCuda::thread().capture_mode, cudaStreamCaptureModeGlobal);
}

TEST_F(CudaCapturesTest, MemoryOnPageBoundariesIsPinnedAgainWithoutSpoilingACapture) {
  fake_.AlignToPagesOnly();
  fake_.SetCapturing(device_.CreateStream("captured").value(), true);
  const absl::StatusOr<HostSegment> segment = device_.pinned_source()->Allocate(2 * kMiB);
  ASSERT_THAT(segment, IsOk());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(segment->data) % (2 * kMiB), 0u);
  EXPECT_EQ(fake_.calls("FreeHost"), 1);
  EXPECT_THAT(device_.pinned_source()->Free(*segment), IsOk());
  EXPECT_EQ(fake_.calls("FreeHost"), 2);
  EXPECT_FALSE(fake_.capture_spoiled());
  EXPECT_EQ(CurrentDevice(), 0);
}

}  // namespace
}  // namespace pinion
