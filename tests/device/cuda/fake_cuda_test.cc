// The fake runtime treats misuse as strictly as CUDA does.

#include "pinion/tests/device/cuda/fake_cuda.h"

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/cuda/cuda_api.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace {

using ::testing::IsEmpty;
using ::testing::Not;

EmulatedOptions TwoDevices() {
  EmulatedOptions options;
  options.device_count = 2;
  options.memory_bytes = 64 * kMiB;
  options.abort_on_race = false;
  return options;
}

// Returns the function pointers of a table in declaration order.
auto Functions(const CudaApi& api) {
  return std::bit_cast<std::array<void*, sizeof(CudaApi) / sizeof(void*)>>(api);
}

TEST(CudaApiTest, EveryFunctionIsThereInEveryTable) {
  for (const CudaApi& api : {RealCudaApi(), FakeCuda::Api()}) {
    const auto functions = Functions(api);
    for (size_t i = 0; i < functions.size(); ++i) EXPECT_NE(functions[i], nullptr) << i;
  }
}

class FakeCudaTest : public ::testing::Test {
 protected:
  FakeCudaTest() : fake_(TwoDevices()), api_(FakeCuda::Api()) {
    EXPECT_EQ(api_.EventCreateWithFlags(&event_, cudaEventDisableTiming), cudaSuccess);
    EXPECT_EQ(api_.MallocAsync(&data_, kSize, stream_), cudaSuccess);
    EXPECT_EQ(api_.HostAlloc(&host_, kSize, cudaHostAllocPortable), cudaSuccess);
    std::memset(host_, 7, kSize);
  }

  static constexpr uint64_t kSize = kMiB;

  cudaStream_t NewStream() {
    cudaStream_t stream = nullptr;
    EXPECT_EQ(api_.StreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    return stream;
  }
  cudaError_t Allocate(uint64_t size_bytes) {
    void* data = nullptr;
    return api_.MallocAsync(&data, size_bytes, stream_);
  }
  cudaError_t CopyIn() {
    return api_.MemcpyAsync(data_, host_, kSize, cudaMemcpyHostToDevice, stream_);
  }
  cudaError_t CopyOutTo(void* host) {
    return api_.MemcpyAsync(host, data_, kSize, cudaMemcpyDeviceToHost, stream_);
  }

  FakeCuda fake_;
  const CudaApi& api_;
  const cudaStream_t stream_ = NewStream();
  cudaEvent_t event_ = nullptr;
  void* data_ = nullptr;
  void* host_ = nullptr;
};

TEST_F(FakeCudaTest, ARecoverableErrorStaysLatchedOnItsThreadUntilItIsRead) {
  EXPECT_EQ(Allocate(kGiB), cudaErrorMemoryAllocation);
  EXPECT_EQ(CopyIn(), cudaSuccess) << "a later call works, and clears nothing";
  std::thread([&] { EXPECT_EQ(api_.GetLastError(), cudaSuccess); }).join();
  EXPECT_EQ(api_.GetLastError(), cudaErrorMemoryAllocation);
  EXPECT_EQ(api_.GetLastError(), cudaSuccess);
}

TEST_F(FakeCudaTest, AStickyErrorIsEveryThreadsForEver) {
  fake_.FailNext("EventRecord", cudaErrorECCUncorrectable);
  EXPECT_EQ(api_.EventRecord(event_, stream_), cudaErrorECCUncorrectable);
  EXPECT_EQ(api_.GetLastError(), cudaErrorECCUncorrectable);
  EXPECT_EQ(api_.GetLastError(), cudaErrorECCUncorrectable);
  std::thread([&] { EXPECT_EQ(CopyIn(), cudaErrorECCUncorrectable); }).join();
  EXPECT_EQ(api_.FreeHost(host_), cudaErrorECCUncorrectable);
}

TEST_F(FakeCudaTest, ALaterCallTellsOfACopyThatFaultedAndItsBytesNeverArrive) {
  fake_.FaultCopy(2, /*unnoticed_calls=*/1);
  std::vector<char> before(kSize, 3);
  EXPECT_EQ(CopyIn(), cudaSuccess);
  EXPECT_EQ(api_.StreamSynchronize(stream_), cudaSuccess);
  std::memcpy(host_, before.data(), kSize);
  EXPECT_EQ(CopyOutTo(host_), cudaSuccess);
  EXPECT_EQ(api_.EventRecord(event_, stream_), cudaSuccess);
  EXPECT_EQ(api_.EventQuery(event_), cudaErrorIllegalAddress);
  EXPECT_EQ(Allocate(1), cudaErrorIllegalAddress);
  EXPECT_EQ(std::memcmp(host_, before.data(), kSize), 0);
  EXPECT_EQ(fake_.failed_function(), "MemcpyAsync");
  EXPECT_FALSE(fake_.machine().SynchronizeDevice(0).ok()) << "its kernels fail, too";
}

TEST_F(FakeCudaTest, AnEventIsRecordedOnStreamsOfItsOwnContextAlone) {
  fake_.SetGreenContext();
  cudaStream_t stream = nullptr;
  cudaEvent_t event = nullptr;
  ASSERT_EQ(api_.StreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(api_.EventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
  EXPECT_EQ(api_.EventRecord(event, stream), cudaSuccess);
  EXPECT_EQ(api_.EventRecord(event_, stream_), cudaSuccess);
  EXPECT_EQ(api_.EventRecord(event, stream_), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(api_.EventRecord(event_, stream), cudaErrorInvalidResourceHandle);
}

TEST_F(FakeCudaTest, NotReadyIsLatchedLikeAnyError) {
  const Kernel kernel = {.name = "long", .reads = {}, .writes = {}, .flops = 1e19};
  ASSERT_THAT(fake_.machine().Launch(0, StreamHandle(stream_), kernel), IsOk());
  EXPECT_EQ(api_.EventRecord(event_, stream_), cudaSuccess);
  EXPECT_EQ(api_.EventQuery(event_), cudaErrorNotReady);
  EXPECT_EQ(api_.GetLastError(), cudaErrorNotReady);
}

TEST_F(FakeCudaTest, ACopyToPageableMemoryReturnsWhenItIsDone) {
  std::vector<char> pageable(kSize);
  EXPECT_EQ(CopyIn(), cudaSuccess);
  EXPECT_EQ(CopyOutTo(pageable.data()), cudaSuccess);
  EXPECT_EQ(std::memcmp(pageable.data(), host_, kSize), 0);
  EXPECT_EQ(api_.EventRecord(event_, stream_), cudaSuccess);
  EXPECT_EQ(api_.EventQuery(event_), cudaSuccess);
}

TEST_F(FakeCudaTest, AStreamWorksOnlyWhileItsDeviceIsCurrent) {
  ASSERT_EQ(api_.SetDevice(1), cudaSuccess);
  EXPECT_EQ(CopyIn(), cudaErrorInvalidValue);
  EXPECT_EQ(api_.EventRecord(event_, stream_), cudaErrorInvalidValue);
  ASSERT_EQ(api_.SetDevice(0), cudaSuccess);
  EXPECT_EQ(CopyIn(), cudaSuccess);
}

TEST_F(FakeCudaTest, MemoryThatIsFreedWhileACopyReadsItIsARace) {
  EXPECT_EQ(CopyIn(), cudaSuccess);
  EXPECT_EQ(api_.FreeHost(host_), cudaSuccess);
  EXPECT_THAT(fake_.machine().races(), Not(IsEmpty()));
}

TEST_F(FakeCudaTest, MemoryThatIsFreedOnAnotherStreamWhileACopyWritesItIsARace) {
  EXPECT_EQ(CopyIn(), cudaSuccess);
  EXPECT_EQ(api_.FreeAsync(data_, NewStream()), cudaSuccess);
  EXPECT_THAT(fake_.machine().races(), Not(IsEmpty()));
}

TEST_F(FakeCudaTest, ADeviceGetsAContextWhenItIsSelectedOrUsed) {
  EXPECT_TRUE(fake_.has_context(0)) << "the test has allocated there";
  EXPECT_FALSE(fake_.has_context(1));
  ASSERT_EQ(api_.SetDevice(1), cudaSuccess);
  EXPECT_TRUE(fake_.has_context(1));
}

TEST_F(FakeCudaTest, SelectingADeviceEndsTheThreadsGreenContextAndPushingOneDoesNot) {
  fake_.SetGreenContext();
  ASSERT_EQ(api_.PushContext(1), cudaSuccess);
  EXPECT_FALSE(FakeCuda::green_is_current());
  ASSERT_EQ(api_.PopContext(), cudaSuccess);
  EXPECT_TRUE(FakeCuda::green_is_current());
  ASSERT_EQ(api_.SetDevice(0), cudaSuccess);
  EXPECT_FALSE(FakeCuda::green_is_current());
}

TEST_F(FakeCudaTest, CreatingAContextSpoilsSomebodysCapture) {
  fake_.SetCapturing(StreamHandle(NewStream()), true);
  ASSERT_EQ(api_.PushContext(0), cudaSuccess);
  ASSERT_EQ(api_.PopContext(), cudaSuccess);
  ASSERT_EQ(api_.SetDevice(0), cudaSuccess);
  EXPECT_FALSE(fake_.capture_spoiled()) << "the device has a context";
  EXPECT_EQ(api_.PushContext(1), cudaErrorStreamCaptureUnsupported);
  EXPECT_TRUE(fake_.capture_spoiled());
  EXPECT_EQ(api_.SetDevice(1), cudaErrorStreamCaptureUnsupported);
  EXPECT_FALSE(fake_.has_context(1));
}

TEST_F(FakeCudaTest, APoppedContextLeavesTheThreadAsItWas) {
  int device = -1;
  ASSERT_EQ(api_.PushContext(1), cudaSuccess);
  ASSERT_EQ(api_.GetDevice(&device), cudaSuccess);
  EXPECT_EQ(device, 1);
  ASSERT_EQ(api_.PopContext(), cudaSuccess);
  ASSERT_EQ(api_.GetDevice(&device), cudaSuccess);
  EXPECT_EQ(device, 0);
}

TEST_F(FakeCudaTest, WaitingForAStreamSpoilsSomebodysCapture) {
  fake_.SetCapturing(StreamHandle(NewStream()), true);
  EXPECT_EQ(api_.StreamSynchronize(stream_), cudaErrorStreamCaptureUnsupported);
  EXPECT_TRUE(fake_.capture_spoiled());
}

// Only cudaStreamIsCapturing is harmless. Any other use of the legacy stream spoils the capture.
TEST_F(FakeCudaTest, TheLegacyStreamIsUnusableWhileAStreamThatItWaitsForCaptures) {
  fake_.SetBlockingStreamCaptures();
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  EXPECT_EQ(api_.StreamIsCapturing(stream_, &status), cudaSuccess);
  for (const cudaStream_t legacy : {cudaStream_t{nullptr}, cudaStreamLegacy}) {
    EXPECT_EQ(api_.StreamIsCapturing(legacy, &status), cudaErrorStreamCaptureImplicit);
  }
  EXPECT_FALSE(fake_.capture_spoiled());
  EXPECT_EQ(api_.EventRecord(event_, stream_), cudaSuccess);
  EXPECT_FALSE(fake_.capture_spoiled());
  EXPECT_EQ(api_.EventRecord(event_, nullptr), cudaErrorStreamCaptureImplicit);
  EXPECT_TRUE(fake_.capture_spoiled());
}

TEST_F(FakeCudaTest, ADestroyedStreamsHandleIsGivenToTheNextOne) {
  fake_.RecycleStreamHandles();
  const Kernel kernel = {.name = "long", .reads = {}, .writes = {}, .flops = 1e19};
  ASSERT_THAT(fake_.machine().Launch(0, StreamHandle(stream_), kernel), IsOk());
  ASSERT_EQ(api_.StreamDestroy(stream_), cudaSuccess);
  const cudaStream_t next = NewStream();
  EXPECT_EQ(next, stream_);
  ASSERT_EQ(api_.EventRecord(event_, next), cudaSuccess);
  EXPECT_EQ(api_.EventQuery(event_), cudaSuccess) << "it is another stream";
}

TEST_F(FakeCudaTest, AUseThatCreatesAContextSpoilsSomebodysCapture) {
  fake_.SetCapturing(StreamHandle(stream_), true);
  std::thread([&] {
    FakeCuda::thread().selected = 1;
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    EXPECT_EQ(api_.StreamIsCapturing(nullptr, &status), cudaErrorStreamCaptureUnsupported);
  }).join();
  EXPECT_TRUE(fake_.capture_spoiled());
  EXPECT_FALSE(fake_.has_context(1));
}

using FakeCudaDeathTest = FakeCudaTest;

TEST_F(FakeCudaDeathTest, AStreamOrAnEventIsNotUsedAfterItWasDestroyed) {
  const cudaStream_t stream = NewStream();
  ASSERT_EQ(api_.StreamDestroy(stream), cudaSuccess);
  EXPECT_DEATH(api_.EventRecord(event_, stream), "a stream was used after it was destroyed");
  EXPECT_DEATH(api_.StreamDestroy(stream), "a stream was used after it was destroyed");
  ASSERT_EQ(api_.EventDestroy(event_), cudaSuccess);
  EXPECT_DEATH(api_.EventQuery(event_), "an event was used after it was destroyed");
  EXPECT_DEATH(api_.EventDestroy(event_), "an event was used after it was destroyed");
}

TEST_F(FakeCudaTest, FreeingPinnedMemoryWaitsForTheDevice) {
  void* unused = nullptr;
  ASSERT_EQ(api_.HostAlloc(&unused, kSize, cudaHostAllocPortable), cudaSuccess);
  EXPECT_EQ(CopyIn(), cudaSuccess);
  EXPECT_EQ(api_.EventRecord(event_, stream_), cudaSuccess);
  EXPECT_EQ(api_.EventQuery(event_), cudaErrorNotReady);
  EXPECT_EQ(api_.FreeHost(unused), cudaSuccess);
  EXPECT_EQ(api_.EventQuery(event_), cudaSuccess);
}

TEST(FakeCudaOnGh200Test, MemoryOfHostAllocStaysPageable) {
  EmulatedOptions options;
  options.preset = *FindPreset("gh200_c2c");
  FakeCuda fake(options);
  const CudaApi& api = FakeCuda::Api();
  void* memory = nullptr;
  ASSERT_EQ(api.HostAlloc(&memory, kMiB, cudaHostAllocPortable), cudaSuccess);
  EXPECT_FALSE(fake.machine().IsPinned(memory));
  EXPECT_EQ(api.FreeHost(memory), cudaSuccess);
}

TEST_F(FakeCudaTest, MuchMoreThanTheDeviceHasIsAnInvalidValue) {
  EXPECT_EQ(Allocate(uint64_t{1} << 50), cudaErrorInvalidValue);
  EXPECT_EQ(Allocate(128 * kMiB), cudaErrorMemoryAllocation);
}

TEST_F(FakeCudaTest, MemoryThatHostAllocDidNotReturnIsNotFreed) {
  EXPECT_EQ(api_.FreeHost(static_cast<char*>(host_) + 4096), cudaErrorInvalidValue);
  EXPECT_EQ(api_.FreeHost(host_), cudaSuccess);
  EXPECT_EQ(api_.FreeHost(host_), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace pinion::testing
