// What the CUDA device does beyond the conformance suite: CUDA's own traps, on the fake runtime.

#include "pinion/device/cuda/cuda_device.h"

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/device/cuda/cuda_api.h"
#include "pinion/device/cuda/cuda_backend.h"
#include "pinion/device/cuda/cuda_status.h"
#include "pinion/device/device.h"
#include "pinion/device/device_backend.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/tests/device/cuda/fake_cuda.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace {

using ::pinion::testing::FakeCuda;
using ::pinion::testing::IsOk;
using ::pinion::testing::IsOkAndHolds;
using ::pinion::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

EmulatedOptions TwoDevices() {
  EmulatedOptions options;
  options.device_count = 2;
  options.memory_bytes = 64 * kMiB;
  return options;
}

class CudaDeviceTest : public ::testing::Test {
 protected:
  CudaDeviceTest() : fake_(TwoDevices()), device_(FakeCuda::Api(), 1) {}

  int CurrentDevice() {
    int device = -1;
    EXPECT_EQ(FakeCuda::Api().GetDevice(&device), cudaSuccess);
    return device;
  }
  // What the next unrelated call of the program would be blamed for.
  cudaError_t LatchedError() { return FakeCuda::Api().GetLastError(); }

  // A stream with hours of work, and an event behind it.
  EventHandle EventBehindLongWork(StreamHandle stream) {
    Kernel kernel;
    kernel.name = "long";
    kernel.flops = 1e19;
    EXPECT_THAT(fake_.machine().Launch(1, stream, kernel), IsOk());
    const EventHandle event = device_.CreateEvent().value();
    EXPECT_THAT(device_.RecordEvent(event, stream), IsOk());
    return event;
  }

  FakeCuda fake_;
  CudaDevice device_;
};

// A registration function left another device current, and later launches went there
// (sglang#26568).
TEST_F(CudaDeviceTest, NoCallLeavesAnotherDeviceCurrent) {
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

TEST_F(CudaDeviceTest, ADeviceThatIsCurrentAlreadyIsNotSetAgain) {
  ASSERT_EQ(FakeCuda::Api().SetDevice(1), cudaSuccess);
  const int calls = fake_.calls("SetDevice");
  EXPECT_THAT(device_.CreateEvent(), IsOk());
  EXPECT_EQ(fake_.calls("SetDevice"), calls);
}

// A failed registration was ignored, and its latched error blamed on the next kernel launch
// (maru#64, vLLM#51081).
TEST_F(CudaDeviceTest, AFailedPinLeavesNoErrorBehind) {
  fake_.FailNext("HostAlloc", cudaErrorMemoryAllocation);
  EXPECT_THAT(
      device_.pinned_source()->Allocate(2 * kMiB),
      StatusIs(absl::StatusCode::kResourceExhausted,
               AllOf(HasSubstr("cudaHostAlloc of 2 MiB"), HasSubstr("cudaErrorMemoryAllocation"))));
  EXPECT_EQ(LatchedError(), cudaSuccess);
}

TEST_F(CudaDeviceTest, OutOfMemoryLeavesNoErrorBehind) {
  const StreamHandle stream = device_.CreateStream("s").value();
  EXPECT_THAT(device_.Allocate(kGiB, stream), StatusIs(absl::StatusCode::kResourceExhausted,
                                                       AllOf(HasSubstr("cuda:1 cannot give 1 GiB"),
                                                             HasSubstr("64 MiB of 64 MiB"))));
  EXPECT_EQ(LatchedError(), cudaSuccess);
}

TEST_F(CudaDeviceTest, AnEventThatIsNotReadyLeavesNoErrorBehind) {
  const StreamHandle stream = device_.CreateStream("s").value();
  const EventHandle event = EventBehindLongWork(stream);
  EXPECT_THAT(device_.QueryEvent(event), IsOkAndHolds(false));
  EXPECT_EQ(LatchedError(), cudaSuccess);
}

TEST_F(CudaDeviceTest, AStickyErrorIsInternalFromThenOn) {
  fake_.FailNext("EventCreateWithFlags", cudaErrorIllegalAddress);
  EXPECT_THAT(device_.CreateEvent(), StatusIs(absl::StatusCode::kInternal,
                                              AllOf(HasSubstr("cudaEventCreateWithFlags on cuda:1"),
                                                    HasSubstr("cudaErrorIllegalAddress"))));
  EXPECT_THAT(device_.CreateEvent(), StatusIs(absl::StatusCode::kInternal));
  EXPECT_THAT(device_.CreateStream("s"), StatusIs(absl::StatusCode::kInternal));
}

TEST_F(CudaDeviceTest, OnePieceIsAPlainCopyAndSeveralAreOneBatch) {
  const StreamHandle stream = device_.CreateStream("s").value();
  auto* const data = static_cast<char*>(device_.Allocate(kMiB, stream).value());
  const HostSegment segment = device_.pinned_source()->Allocate(2 * kMiB).value();
  auto* const host = static_cast<char*>(segment.data);
  const std::vector<CopyPiece> pieces = {{data, host, 100}, {data + 200, host + 300, 100}};

  EXPECT_THAT(device_.CopyAsync(CopyDirection::kHostToDevice, {&pieces[0], 1}, stream), IsOk());
  EXPECT_EQ(fake_.calls("MemcpyAsync"), 1);
  EXPECT_THAT(device_.CopyAsync(CopyDirection::kHostToDevice, pieces, stream), IsOk());
  EXPECT_EQ(fake_.calls("MemcpyAsync"), 1);
  EXPECT_EQ(fake_.calls("MemcpyBatchAsync"), 1);

  CudaDevice older(FakeCuda::ApiWithoutBatch(), 1);
  EXPECT_THAT(older.CopyAsync(CopyDirection::kHostToDevice, pieces, stream), IsOk());
  EXPECT_EQ(fake_.calls("MemcpyAsync"), 3);
  EXPECT_EQ(fake_.calls("MemcpyBatchAsync"), 1);
}

// One call of 51,828 pieces ended in a segmentation fault, and repeated smaller ones in a hang
// (vllm#49276).
TEST_F(CudaDeviceTest, ABatchOfManyPiecesIsSeveralCalls) {
  constexpr uint64_t kPieces = 3000;
  const StreamHandle stream = device_.CreateStream("s").value();
  auto* const data = static_cast<char*>(device_.Allocate(kMiB, stream).value());
  const HostSegment segment = device_.pinned_source()->Allocate(2 * kMiB).value();
  auto* const host = static_cast<char*>(segment.data);
  std::vector<CopyPiece> in, out;
  for (uint64_t i = 0; i < kPieces; ++i) {
    host[16 * i] = static_cast<char>(i * 7);
    in.push_back({data + 16 * i, host + 16 * i, 1});
    out.push_back({host + kMiB + 16 * i, data + 16 * i, 1});
  }
  EXPECT_THAT(device_.CopyAsync(CopyDirection::kHostToDevice, in, stream), IsOk());
  EXPECT_EQ(fake_.calls("MemcpyBatchAsync"), 3);
  EXPECT_THAT(device_.CopyAsync(CopyDirection::kDeviceToHost, out, stream), IsOk());
  EXPECT_THAT(device_.SynchronizeStream(stream), IsOk());
  for (uint64_t i = 0; i < kPieces; ++i) {
    ASSERT_EQ(host[kMiB + 16 * i], static_cast<char>(i * 7)) << i;
  }
  EXPECT_EQ(fake_.calls("MemcpyAsync"), 0);
}

TEST_F(CudaDeviceTest, WhenALaterCallOfABatchFailsNothingIsWrittenAfterwards) {
  const StreamHandle stream = device_.CreateStream("s").value();
  auto* const data = static_cast<char*>(device_.Allocate(kMiB, stream).value());
  const HostSegment segment = device_.pinned_source()->Allocate(2 * kMiB).value();
  auto* const host = static_cast<char*>(segment.data);
  std::vector<CopyPiece> pieces;
  for (uint64_t i = 0; i < 1024; ++i) pieces.push_back({data + 16 * i, host + 16 * i, 1});
  pieces.push_back({host, host + kMiB, 1});  // no memory of the device
  EXPECT_THAT(device_.CopyAsync(CopyDirection::kHostToDevice, pieces, stream),
              StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_EQ(fake_.calls("MemcpyBatchAsync"), 2);
  EXPECT_EQ(fake_.calls("StreamSynchronize"), 1);
}

// A driver may copy the pieces of a batch by a kernel, which queues behind compute.
TEST_F(CudaDeviceTest, LargePiecesAreCopiedOneByOne) {
  const StreamHandle stream = device_.CreateStream("s").value();
  auto* const data = static_cast<char*>(device_.Allocate(4 * kMiB, stream).value());
  const HostSegment segment = device_.pinned_source()->Allocate(4 * kMiB).value();
  auto* const host = static_cast<char*>(segment.data);
  const std::vector<CopyPiece> pieces = {{data, host, kMiB},
                                         {data + 2 * kMiB, host + 2 * kMiB, kMiB}};
  EXPECT_THAT(device_.CopyAsync(CopyDirection::kHostToDevice, pieces, stream), IsOk());
  EXPECT_EQ(fake_.calls("MemcpyAsync"), 2);
  EXPECT_EQ(fake_.calls("MemcpyBatchAsync"), 0);
}

TEST_F(CudaDeviceTest, TheLegacyStreamGetsNoBatch) {
  const StreamHandle stream = device_.CreateStream("s").value();
  auto* const data = static_cast<char*>(device_.Allocate(kMiB, stream).value());
  const HostSegment segment = device_.pinned_source()->Allocate(2 * kMiB).value();
  auto* const host = static_cast<char*>(segment.data);
  const std::vector<CopyPiece> pieces = {{data, host, 100}, {data + 200, host + 300, 100}};
  ASSERT_THAT(device_.SynchronizeStream(stream), IsOk());
  for (const cudaStream_t legacy : {cudaStream_t{nullptr}, cudaStreamLegacy}) {
    EXPECT_THAT(device_.CopyAsync(CopyDirection::kHostToDevice, pieces, StreamHandle(legacy)),
                IsOk());
  }
  EXPECT_EQ(fake_.calls("MemcpyBatchAsync"), 0);
  EXPECT_EQ(fake_.calls("MemcpyAsync"), 4);
}

// It names another stream on each thread: an event of one thread's would order another's.
TEST_F(CudaDeviceTest, TheStreamPerThreadIsRefusedByName) {
  const StreamHandle per_thread(cudaStreamPerThread);
  const auto refusal = StatusIs(absl::StatusCode::kInvalidArgument,
                                HasSubstr("cudaStreamPerThread is another stream on each thread"));
  EXPECT_THAT(device_.RecordEvent(device_.CreateEvent().value(), per_thread), refusal);
  EXPECT_THAT(device_.IsCapturing(per_thread), refusal);
}

TEST_F(CudaDeviceTest, TheLegacyStreamCapturesWhileAStreamThatItWaitsForDoes) {
  EXPECT_THAT(device_.IsCapturing(StreamHandle(nullptr)), IsOkAndHolds(false));
  fake_.SetBlockingStreamCaptures();
  EXPECT_THAT(device_.IsCapturing(StreamHandle(nullptr)), IsOkAndHolds(true));
  EXPECT_EQ(LatchedError(), cudaSuccess);
  EXPECT_FALSE(fake_.capture_spoiled());
}

// Every rank of a host had a context on device 0 (pytorch#135279).
TEST_F(CudaDeviceTest, AThreadThatNeverChoseADeviceGetsNoContextOnDeviceZero) {
  const StreamHandle stream = device_.CreateStream("s").value();
  const HostSegment segment = device_.pinned_source()->Allocate(2 * kMiB).value();
  EXPECT_THAT(device_.SynchronizeStream(stream), IsOk());
  EXPECT_THAT(device_.pinned_source()->Free(segment), IsOk());
  EXPECT_TRUE(fake_.has_context(1));
  EXPECT_FALSE(fake_.has_context(0));
  EXPECT_EQ(CurrentDevice(), 0);
}

TEST_F(CudaDeviceTest, AThreadThatChoseADeviceGetsItBack) {
  ASSERT_EQ(FakeCuda::Api().SetDevice(0), cudaSuccess);
  EXPECT_THAT(device_.CreateEvent(), IsOk());
  EXPECT_EQ(CurrentDevice(), 0);
}

// A driver whose contexts the runtime does not hand out.
TEST_F(CudaDeviceTest, WithoutTheDriversCallsADeviceIsSelectedAndPutBack) {
  fake_.FailNext("HasContext", cudaErrorNotSupported);
  EXPECT_THAT(device_.CreateEvent(), IsOk());
  EXPECT_EQ(CurrentDevice(), 0);
}

// The runtime has the call and the driver does not: cudart 12.8 on a driver of CUDA 12.4, say.
TEST_F(CudaDeviceTest, ADriverWithoutTheBatchCallIsAskedOnce) {
  for (const cudaError_t refusal : {cudaErrorCallRequiresNewerDriver, cudaErrorNotSupported}) {
    SCOPED_TRACE(cudaGetErrorName(refusal));
    CudaDevice device(FakeCuda::Api(), 1);
    const StreamHandle stream = device.CreateStream("s").value();
    auto* const data = static_cast<char*>(device.Allocate(kMiB, stream).value());
    const HostSegment segment = device.pinned_source()->Allocate(2 * kMiB).value();
    auto* const host = static_cast<char*>(segment.data);
    const std::vector<CopyPiece> pieces = {{data, host, 100}, {data + 200, host + 300, 100}};
    const int copies = fake_.calls("MemcpyAsync");
    const int batches = fake_.calls("MemcpyBatchAsync");
    fake_.FailNext("MemcpyBatchAsync", refusal);

    EXPECT_THAT(device.CopyAsync(CopyDirection::kHostToDevice, pieces, stream), IsOk());
    EXPECT_EQ(LatchedError(), cudaSuccess);
    EXPECT_EQ(fake_.calls("MemcpyAsync"), copies + 2);
    EXPECT_THAT(device.CopyAsync(CopyDirection::kHostToDevice, pieces, stream), IsOk());
    EXPECT_EQ(fake_.calls("MemcpyAsync"), copies + 4);
    EXPECT_EQ(fake_.calls("MemcpyBatchAsync"), batches + 1);
  }
}

TEST_F(CudaDeviceTest, NothingIsWrittenAfterACopyOfSeveralPiecesHasFailed) {
  const StreamHandle stream = device_.CreateStream("s").value();
  auto* const data = static_cast<char*>(device_.Allocate(kMiB, stream).value());
  const HostSegment segment = device_.pinned_source()->Allocate(2 * kMiB).value();
  auto* const host = static_cast<char*>(segment.data);
  CudaDevice older(FakeCuda::ApiWithoutBatch(), 1);
  // The first piece is good and enqueued; the second is no memory of the device.
  const std::vector<CopyPiece> pieces = {{host, data, 100}, {host + 300, host + 600, 100}};
  EXPECT_THAT(older.CopyAsync(CopyDirection::kDeviceToHost, pieces, stream),
              StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_EQ(fake_.calls("StreamSynchronize"), 1);
}

// Querying an event while any stream captures in the global mode spoils that capture
// (pytorch#193982 and the caching allocator's own guard).
TEST_F(CudaDeviceTest, QueriesAndPinningDoNotSpoilSomebodysCapture) {
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
  // The thread's mode is as it was.
  EXPECT_EQ(FakeCuda::Api().EventQuery(static_cast<cudaEvent_t>(event.native())),
            cudaErrorStreamCaptureUnsupported);
}

TEST_F(CudaDeviceTest, AFailedCopyIsWaitedForWithoutSpoilingSomebodysCapture) {
  const StreamHandle stream = device_.CreateStream("s").value();
  auto* const data = static_cast<char*>(device_.Allocate(kMiB, stream).value());
  const HostSegment segment = device_.pinned_source()->Allocate(2 * kMiB).value();
  auto* const host = static_cast<char*>(segment.data);
  fake_.SetCapturing(device_.CreateStream("captured").value(), true);
  fake_.FailNext("MemcpyBatchAsync", cudaErrorMemoryAllocation);
  const std::vector<CopyPiece> pieces = {{data, host, 100}, {data + 200, host + 300, 100}};
  EXPECT_THAT(device_.CopyAsync(CopyDirection::kHostToDevice, pieces, stream),
              StatusIs(absl::StatusCode::kResourceExhausted));
  EXPECT_EQ(fake_.calls("StreamSynchronize"), 1);
  EXPECT_FALSE(fake_.capture_spoiled());
}

TEST_F(CudaDeviceTest, ATimeOfAnEventThatIsNotDoneLeavesNoErrorBehind) {
  const StreamHandle stream = device_.CreateStream("s").value();
  const EventHandle before = device_.CreateTimedEvent().value();
  const EventHandle after = device_.CreateTimedEvent().value();
  ASSERT_THAT(device_.RecordEvent(before, stream), IsOk());
  EventBehindLongWork(stream);
  ASSERT_THAT(device_.RecordEvent(after, stream), IsOk());
  EXPECT_THAT(device_.ElapsedMs(before, after), StatusIs(absl::StatusCode::kUnavailable));
  EXPECT_EQ(LatchedError(), cudaSuccess);
}

TEST_F(CudaDeviceTest, MemoryThatCameUnalignedOnceIsAskedForWithRoomToAlignIt) {
  fake_.AlignToPagesOnly();
  for (int i = 0; i < 3; ++i) {
    const HostSegment segment = device_.pinned_source()->Allocate(2 * kMiB).value();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(segment.data) % (2 * kMiB), 0u);
  }
  EXPECT_EQ(fake_.calls("HostAlloc"), 4) << "the first one was pinned twice";
}

TEST_F(CudaDeviceTest, MemoryOnPageBoundariesIsPinnedAgainWithoutSpoilingACapture) {
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

TEST_F(CudaDeviceTest, WaitingForAStuckEventEndsWithDeadlineExceeded) {
  const StreamHandle stream = device_.CreateStream("s").value();
  const EventHandle event = EventBehindLongWork(stream);
  EXPECT_THAT(device_.WaitEvent(event, absl::Milliseconds(3)),
              StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("cuda:1")));
}

TEST_F(CudaDeviceTest, ErrorsMeanWhatTheDeviceInterfaceSays) {
  const auto code = [](cudaError_t error) {
    return CudaStatus(FakeCuda::Api(), error, "what").code();
  };
  EXPECT_EQ(code(cudaSuccess), absl::StatusCode::kOk);
  EXPECT_EQ(code(cudaErrorMemoryAllocation), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(code(cudaErrorDevicesUnavailable), absl::StatusCode::kUnavailable);
  EXPECT_EQ(code(cudaErrorInvalidValue), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(cudaErrorStreamCaptureUnsupported), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(code(cudaErrorCallRequiresNewerDriver), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(code(cudaErrorInsufficientDriver), absl::StatusCode::kNotFound);
  EXPECT_EQ(code(cudaErrorIllegalAddress), absl::StatusCode::kInternal);
  EXPECT_EQ(code(cudaErrorECCUncorrectable), absl::StatusCode::kInternal);
  EXPECT_EQ(code(cudaErrorUnknown), absl::StatusCode::kInternal);
}

TEST_F(CudaDeviceTest, WhatSysfsDoesNotKnowOfTheLinkStaysUnknown) {
  const DeviceInfo info = device_.info();
  EXPECT_EQ(info.model, fake_.machine().device(1)->info().model);
  EXPECT_EQ(info.link, LinkKind::kUnknown);
  EXPECT_EQ(info.link_name, "");
  EXPECT_EQ(info.rated_gb_per_s, 0);
  EXPECT_EQ(info.numa_node, -1);
  EXPECT_FALSE(info.modelled);
  EXPECT_EQ(LatchedError(), cudaSuccess);
}

TEST_F(CudaDeviceTest, ADeviceThatCannotBeAskedIsUnknownAndLeavesNoErrorBehind) {
  fake_.FailNext("GetDeviceProperties", cudaErrorInvalidDevice);
  fake_.FailNext("DeviceGetAttribute", cudaErrorInvalidValue);
  EXPECT_EQ(device_.info().model, "");
  EXPECT_EQ(LatchedError(), cudaSuccess);
}

TEST(CudaDeviceInfoTest, ADeviceThatReadsTheHostsPageTablesHangsOnNvlinkC2c) {
  EmulatedOptions options;
  options.preset = *FindPreset("gh200_c2c");
  const FakeCuda fake(options);
  const DeviceInfo info = CudaDevice(FakeCuda::Api(), 0).info();
  EXPECT_EQ(info.link, LinkKind::kNvlinkC2c);
  EXPECT_EQ(info.link_name, "NVLink-C2C");
  EXPECT_EQ(info.rated_gb_per_s, 450);
}

TEST_F(CudaDeviceTest, TheBackendHandsOutDevicesThatExist) {
  const DeviceBackend backend = CudaBackend(FakeCuda::Api());
  EXPECT_EQ(backend.type_name, "cuda");
  EXPECT_THAT(CudaDeviceCount(FakeCuda::Api()), IsOkAndHolds(2));
  const absl::StatusOr<std::shared_ptr<Device>> device = backend.device(1);
  ASSERT_THAT(device, IsOk());
  EXPECT_EQ((*device)->name(), "cuda:1");
  EXPECT_THAT(backend.device(2), StatusIs(absl::StatusCode::kNotFound,
                                          AllOf(HasSubstr("cuda:2"), HasSubstr("2 device(s)"))));
}

TEST_F(CudaDeviceTest, WithoutADriverTheBackendSaysWhatIsMissing) {
  fake_.SetNoDriver();
  EXPECT_THAT(
      CudaBackend(FakeCuda::Api()).device(0),
      StatusIs(absl::StatusCode::kNotFound,
               AllOf(HasSubstr("NVIDIA driver"), HasSubstr("cudaErrorInsufficientDriver"))));
  EXPECT_EQ(LatchedError(), cudaSuccess);
}

}  // namespace
}  // namespace pinion
