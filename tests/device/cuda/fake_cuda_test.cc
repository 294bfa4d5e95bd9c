// The fake runtime is honest: it does to a program what CUDA does.

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

// Every function of a table, in its order.
auto Functions(const CudaApi& api) {
  return std::bit_cast<std::array<void*, sizeof(CudaApi) / sizeof(void*)>>(api);
}

TEST(CudaApiTest, EveryFunctionIsThereInEveryTable) {
  for (const CudaApi* const api : {&RealCudaApi(), &FakeCuda::Api()}) {
    const auto functions = Functions(*api);
    for (size_t i = 0; i < functions.size(); ++i) EXPECT_NE(functions[i], nullptr) << i;
  }
  CudaApi older = FakeCuda::ApiWithoutBatch();
  EXPECT_EQ(older.MemcpyBatchAsync, nullptr);
  older.MemcpyBatchAsync = FakeCuda::Api().MemcpyBatchAsync;
  EXPECT_EQ(Functions(older), Functions(FakeCuda::Api()));
}

class FakeCudaTest : public ::testing::Test {
 protected:
  FakeCudaTest() : fake_(TwoDevices()), api_(FakeCuda::Api()) {
    EXPECT_EQ(api_.StreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
    EXPECT_EQ(api_.EventCreateWithFlags(&event_, cudaEventDisableTiming), cudaSuccess);
    EXPECT_EQ(api_.MallocAsync(&data_, kSize, stream_), cudaSuccess);
    EXPECT_EQ(api_.HostAlloc(&host_, kSize, cudaHostAllocPortable), cudaSuccess);
    std::memset(host_, 7, kSize);
  }

  static constexpr uint64_t kSize = kMiB;

  cudaError_t CopyIn() {
    return api_.MemcpyAsync(data_, host_, kSize, cudaMemcpyHostToDevice, stream_);
  }
  cudaError_t CopyOutTo(void* host) {
    return api_.MemcpyAsync(host, data_, kSize, cudaMemcpyDeviceToHost, stream_);
  }

  FakeCuda fake_;
  const CudaApi& api_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t event_ = nullptr;
  void* data_ = nullptr;
  void* host_ = nullptr;
};

TEST_F(FakeCudaTest, ARecoverableErrorStaysLatchedOnItsThreadUntilItIsRead) {
  void* data = nullptr;
  EXPECT_EQ(api_.MallocAsync(&data, kGiB, stream_), cudaErrorMemoryAllocation);
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
  void* data = nullptr;
  EXPECT_EQ(api_.MallocAsync(&data, 1, stream_), cudaErrorIllegalAddress);
  EXPECT_EQ(std::memcmp(host_, before.data(), kSize), 0);
  EXPECT_EQ(fake_.failed_function(), "MemcpyAsync");
  EXPECT_FALSE(fake_.machine().SynchronizeDevice(0).ok()) << "its kernels fail, too";
}

TEST_F(FakeCudaTest, NotReadyIsLatchedLikeAnyError) {
  Kernel kernel;
  kernel.name = "long";
  kernel.flops = 1e19;
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
  cudaStream_t other = nullptr;
  ASSERT_EQ(api_.StreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaSuccess);
  EXPECT_EQ(CopyIn(), cudaSuccess);
  EXPECT_EQ(api_.FreeAsync(data_, other), cudaSuccess);
  EXPECT_THAT(fake_.machine().races(), Not(IsEmpty()));
}

TEST_F(FakeCudaTest, ABatchThatFailsHasEnqueuedHalfOfItsPieces) {
  char* const to = static_cast<char*>(data_);
  const char* const from = static_cast<const char*>(host_);
  void* const dsts[] = {to, to + 100};
  const void* const srcs[] = {from, from + 100};
  const size_t sizes[] = {100, 100};
  std::memset(host_, 1, kSize);
  EXPECT_EQ(CopyIn(), cudaSuccess);
  EXPECT_EQ(api_.StreamSynchronize(stream_), cudaSuccess);
  std::memset(host_, 2, kSize);
  fake_.FailNext("MemcpyBatchAsync", cudaErrorMemoryAllocation);
  EXPECT_EQ(api_.MemcpyBatchAsync(dsts, srcs, sizes, 2, stream_), cudaErrorMemoryAllocation);
  EXPECT_EQ(api_.StreamSynchronize(stream_), cudaSuccess);
  std::vector<char> there(kSize);
  EXPECT_EQ(CopyOutTo(there.data()), cudaSuccess);
  EXPECT_EQ(there[0], 2);
  EXPECT_EQ(there[100], 1);
}

TEST_F(FakeCudaTest, RegisteredAndAllocatedMemoryAreNotMistakenForEachOther) {
  alignas(4096) static char memory[8192];
  EXPECT_EQ(api_.HostUnregister(host_), cudaErrorHostMemoryNotRegistered);
  EXPECT_EQ(api_.HostRegister(memory, sizeof(memory), cudaHostRegisterPortable), cudaSuccess);
  EXPECT_NE(api_.HostRegister(memory, sizeof(memory), cudaHostRegisterPortable), cudaSuccess);
  EXPECT_EQ(api_.FreeHost(memory), cudaErrorInvalidValue);
  EXPECT_EQ(api_.HostUnregister(memory), cudaSuccess);
}

TEST_F(FakeCudaTest, APieceThatSpansTwoRegistrationsIsRefused) {
  alignas(4096) static char memory[8192];
  ASSERT_EQ(api_.HostRegister(memory, 4096, cudaHostRegisterPortable), cudaSuccess);
  const auto copy = [&](char* from) {
    return api_.MemcpyAsync(data_, from, 4096, cudaMemcpyHostToDevice, stream_);
  };
  EXPECT_EQ(copy(memory + 2048), cudaErrorInvalidValue) << "half of it is not registered";
  ASSERT_EQ(api_.HostRegister(memory + 4096, 4096, cudaHostRegisterPortable), cudaSuccess);
  EXPECT_EQ(copy(memory + 2048), cudaErrorInvalidValue) << "it is two registrations";
  const void* const from = memory + 2048;
  const size_t size_bytes = 4096;
  EXPECT_EQ(api_.MemcpyBatchAsync(&data_, &from, &size_bytes, 1, stream_), cudaErrorInvalidValue);
  EXPECT_EQ(copy(memory + 4096), cudaSuccess);
  EXPECT_EQ(api_.StreamSynchronize(stream_), cudaSuccess);
  EXPECT_EQ(api_.HostUnregister(memory), cudaSuccess);
  EXPECT_EQ(api_.HostUnregister(memory + 4096), cudaSuccess);
}

}  // namespace
}  // namespace pinion::testing
