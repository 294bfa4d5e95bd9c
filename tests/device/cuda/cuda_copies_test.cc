// Driver calls of the CUDA device's copies, and the state after a failed one; on the fake runtime.

#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/cuda/cuda_api.h"
#include "pinion/device/cuda/cuda_device.h"
#include "pinion/device/cuda/cuda_registered_source.h"
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

class CudaCopiesTest : public testing::CudaDeviceFixture {
 protected:
  static constexpr uint64_t kBytes = 8 * kMiB;

  // Returns memory without a registration border: a border would split a copy into one more piece.
  char* NewHost() {
    void* data = nullptr;
    do {
      data = device_.pinned_source()->Allocate(kBytes).value().data;
    } while (BytesToRegistrationBorder(data, kBytes) < kBytes);
    return static_cast<char*>(data);
  }

  const StreamHandle stream_ = device_.CreateStream("s").value();
  char* const data_ = static_cast<char*>(device_.Allocate(kBytes, stream_).value());
  char* const host_ = NewHost();
  char* const back_ = NewHost();
  const std::vector<CopyPiece> two_pieces_ = {{data_, host_, 100}, {data_ + 200, host_ + 300, 100}};
};

TEST_F(CudaCopiesTest, OnePieceIsAPlainCopyAndSeveralAreOneBatch) {
  EXPECT_THAT(device_.CopyAsync(CopyDirection::kHostToDevice, {&two_pieces_[0], 1}, stream_),
              IsOk());
  EXPECT_EQ(fake_.calls("MemcpyAsync"), 1);
  EXPECT_THAT(device_.CopyAsync(CopyDirection::kHostToDevice, two_pieces_, stream_), IsOk());
  EXPECT_EQ(fake_.calls("MemcpyAsync"), 1);
  EXPECT_EQ(fake_.calls("MemcpyBatchAsync"), 1);

  CudaDevice older(FakeCuda::ApiWithoutBatch(), 1);
  EXPECT_THAT(older.CopyAsync(CopyDirection::kHostToDevice, two_pieces_, stream_), IsOk());
  EXPECT_EQ(fake_.calls("MemcpyAsync"), 3);
  EXPECT_EQ(fake_.calls("MemcpyBatchAsync"), 1);
}

TEST_F(CudaCopiesTest, ABatchMakesItsDeviceCurrentOnce) {
  const int calls = fake_.calls("GetDevice");
  EXPECT_THAT(device_.CopyAsync(CopyDirection::kHostToDevice, two_pieces_, stream_), IsOk());
  EXPECT_EQ(fake_.calls("GetDevice"), calls + 1);
}

// A driver crashed in one call of 51,828 pieces, and hung after repeated smaller ones (vllm#49276).
TEST_F(CudaCopiesTest, ABatchOfManyPiecesIsSeveralCalls) {
  constexpr uint64_t kPieces = 3000;
  std::vector<CopyPiece> in, out;
  for (uint64_t i = 0; i < kPieces; ++i) {
    host_[16 * i] = static_cast<char>(i * 7);
    in.push_back({data_ + 16 * i, host_ + 16 * i, 1});
    out.push_back({back_ + 16 * i, data_ + 16 * i, 1});
  }
  EXPECT_THAT(device_.CopyAsync(CopyDirection::kHostToDevice, in, stream_), IsOk());
  EXPECT_EQ(fake_.calls("MemcpyBatchAsync"), 3);
  EXPECT_THAT(device_.CopyAsync(CopyDirection::kDeviceToHost, out, stream_), IsOk());
  EXPECT_THAT(device_.SynchronizeStream(stream_), IsOk());
  for (uint64_t i = 0; i < kPieces; ++i) {
    ASSERT_EQ(back_[16 * i], static_cast<char>(i * 7)) << i;
  }
  EXPECT_EQ(fake_.calls("MemcpyAsync"), 0);
}

// A driver may copy small pieces with a kernel, which queues behind compute kernels. Large pieces
// must use the copy engines.
TEST_F(CudaCopiesTest, LargePiecesAreCopiedOneByOneAndSmallOnesInABatch) {
  constexpr uint64_t kLarge = kMiB;
  const struct {
    std::vector<uint64_t> sizes;
    int copies, batches;
  } cases[] = {{{kLarge, kLarge}, 2, 0},
               {{kLarge - 1, kLarge - 1}, 0, 1},
               {{kLarge - 1, 4 * kLarge, kLarge - 1}, 1, 1},  // the average piece is large
               {{1, 1, kLarge, 1, 1, 1, kLarge, 1}, 2, 1},
               {{1, kLarge}, 2, 0}};  // a single small piece is no batch
  for (const auto& [sizes, copies, batches] : cases) {
    SCOPED_TRACE(::testing::PrintToString(sizes));
    uint64_t offset = 0;
    std::vector<CopyPiece> in, out;
    for (const uint64_t size_bytes : sizes) {
      std::memset(host_ + offset, static_cast<int>(sizes.size() + in.size()), size_bytes);
      in.push_back({data_ + offset, host_ + offset, size_bytes});
      out.push_back({back_ + offset, data_ + offset, size_bytes});
      offset += size_bytes;
    }
    const int copies_before = fake_.calls("MemcpyAsync");
    const int batches_before = fake_.calls("MemcpyBatchAsync");
    EXPECT_THAT(device_.CopyAsync(CopyDirection::kHostToDevice, in, stream_), IsOk());
    EXPECT_EQ(fake_.calls("MemcpyAsync") - copies_before, copies);
    EXPECT_EQ(fake_.calls("MemcpyBatchAsync") - batches_before, batches);
    EXPECT_THAT(device_.CopyAsync(CopyDirection::kDeviceToHost, out, stream_), IsOk());
    EXPECT_THAT(device_.SynchronizeStream(stream_), IsOk());
    EXPECT_EQ(std::memcmp(back_, host_, offset), 0);
  }
}

TEST_F(CudaCopiesTest, TheLegacyStreamGetsNoBatch) {
  ASSERT_THAT(device_.SynchronizeStream(stream_), IsOk());
  for (const cudaStream_t legacy : {cudaStream_t{nullptr}, cudaStreamLegacy}) {
    EXPECT_THAT(device_.CopyAsync(CopyDirection::kHostToDevice, two_pieces_, StreamHandle(legacy)),
                IsOk());
  }
  EXPECT_EQ(fake_.calls("MemcpyBatchAsync"), 0);
  EXPECT_EQ(fake_.calls("MemcpyAsync"), 4);
}

// The runtime may have the call without the driver, e.g. cudart 12.8 on a driver for CUDA 12.4.
TEST_F(CudaCopiesTest, ADriverWithoutTheBatchCallIsAskedOnce) {
  for (const cudaError_t refusal : {cudaErrorCallRequiresNewerDriver, cudaErrorNotSupported}) {
    SCOPED_TRACE(cudaGetErrorName(refusal));
    CudaDevice device(FakeCuda::Api(), 1);
    const int copies = fake_.calls("MemcpyAsync");
    const int batches = fake_.calls("MemcpyBatchAsync");
    fake_.FailNext("MemcpyBatchAsync", refusal);
    EXPECT_THAT(device.CopyAsync(CopyDirection::kHostToDevice, two_pieces_, stream_), IsOk());
    EXPECT_EQ(LatchedError(), cudaSuccess);
    EXPECT_EQ(fake_.calls("MemcpyAsync"), copies + 2);
    EXPECT_THAT(device.CopyAsync(CopyDirection::kHostToDevice, two_pieces_, stream_), IsOk());
    EXPECT_EQ(fake_.calls("MemcpyAsync"), copies + 4);
    EXPECT_EQ(fake_.calls("MemcpyBatchAsync"), batches + 1);
  }
}

TEST_F(CudaCopiesTest, WhenALaterCallOfABatchFailsNothingIsWrittenAfterwards) {
  std::vector<CopyPiece> pieces;
  for (uint64_t i = 0; i < 1024; ++i) pieces.push_back({data_ + 16 * i, host_ + 16 * i, 1});
  EXPECT_THAT(device_.CopyAsync(CopyDirection::kHostToDevice, pieces, stream_), IsOk());
  EXPECT_EQ(fake_.calls("MemcpyBatchAsync"), 1);
  pieces.push_back({host_, host_ + kMiB, 1});  // not device memory
  EXPECT_THAT(device_.CopyAsync(CopyDirection::kHostToDevice, pieces, stream_),
              StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_EQ(fake_.calls("MemcpyBatchAsync"), 3);
  EXPECT_EQ(fake_.calls("StreamSynchronize"), 1);
}

TEST_F(CudaCopiesTest, NothingIsWrittenAfterACopyOfSeveralPiecesHasFailed) {
  CudaDevice older(FakeCuda::ApiWithoutBatch(), 1);
  // The first piece is valid and enqueued; the second one is not device memory.
  const std::vector<CopyPiece> pieces = {{host_, data_, 100}, {host_ + 300, host_ + 600, 100}};
  EXPECT_THAT(older.CopyAsync(CopyDirection::kDeviceToHost, pieces, stream_),
              StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_EQ(fake_.calls("StreamSynchronize"), 1);
}

TEST_F(CudaCopiesTest, AFailedCopyIsWaitedForWithoutSpoilingSomebodysCapture) {
  fake_.SetCapturing(device_.CreateStream("captured").value(), true);
  fake_.FailNext("MemcpyBatchAsync", cudaErrorMemoryAllocation);
  EXPECT_THAT(device_.CopyAsync(CopyDirection::kHostToDevice, two_pieces_, stream_),
              StatusIs(absl::StatusCode::kResourceExhausted));
  EXPECT_EQ(fake_.calls("StreamSynchronize"), 1);
  EXPECT_FALSE(fake_.capture_spoiled());
}

// A failed single call enqueued nothing, and a broken device writes nothing: no wait is needed.
TEST_F(CudaCopiesTest, AFailureThatNothingCanFollowIsNotWaitedFor) {
  fake_.FailNext("MemcpyAsync", cudaErrorInvalidValue);
  EXPECT_THAT(device_.CopyAsync(CopyDirection::kHostToDevice, {&two_pieces_[0], 1}, stream_),
              StatusIs(absl::StatusCode::kInvalidArgument));
  fake_.FailNext("MemcpyBatchAsync", cudaErrorIllegalAddress);
  EXPECT_THAT(device_.CopyAsync(CopyDirection::kHostToDevice, two_pieces_, stream_),
              StatusIs(absl::StatusCode::kInternal));
  EXPECT_EQ(fake_.calls("StreamSynchronize"), 0);
}

TEST_F(CudaCopiesTest, AFailedCopyThatCannotBeWaitedForIsAsBadAsABrokenDevice) {
  fake_.FailNext("MemcpyBatchAsync", cudaErrorMemoryAllocation);
  fake_.FailNext("StreamSynchronize", cudaErrorDevicesUnavailable);
  EXPECT_THAT(
      device_.CopyAsync(CopyDirection::kHostToDevice, two_pieces_, stream_),
      StatusIs(absl::StatusCode::kInternal,
               AllOf(HasSubstr("cudaErrorMemoryAllocation"), HasSubstr("could not be waited for"),
                     HasSubstr("cudaErrorDevicesUnavailable"))));
}

TEST_F(CudaCopiesTest, ACopyOfNothingIsRefused) {
  EXPECT_THAT(device_.CopyAsync(CopyDirection::kHostToDevice, {}, stream_),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no pieces")));
}

}  // namespace
}  // namespace pinion
