// Driver calls of the CUDA device's copies, and the state after a failed one; on the fake runtime.

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/cuda/cuda_api.h"
#include "pinion/device/device.h"
#include "pinion/tests/device/cuda/cuda_device_fixture.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace {

using ::pinion::testing::IsOk;
using ::pinion::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

class CudaCopiesTest : public testing::CudaDeviceFixture {
 protected:
  static constexpr uint64_t kBytes = 8 * kMiB;

  absl::Status CopyTwoPieces() {
    return device_.CopyAsync(CopyDirection::kHostToDevice, two_pieces_, stream_);
  }

  const StreamHandle stream_ = device_.CreateStream("s").value();
  char* const data_ = static_cast<char*>(device_.Allocate(kBytes, stream_).value());
  char* const host_ = static_cast<char*>(device_.pinned_source()->Allocate(kBytes).value().data);
  const std::vector<CopyPiece> two_pieces_ = {{data_, host_, 100}, {data_ + 200, host_ + 300, 100}};
};

TEST_F(CudaCopiesTest, SeveralPiecesMakeTheirDeviceCurrentOnce) {
  const int calls = fake_.calls("GetDevice");
  EXPECT_THAT(CopyTwoPieces(), IsOk());
  EXPECT_EQ(fake_.calls("GetDevice"), calls + 1);
  EXPECT_EQ(fake_.calls("MemcpyAsync"), 2);
}

TEST_F(CudaCopiesTest, NothingIsWrittenAfterACopyOfSeveralPiecesHasFailed) {
  // The first piece is valid and enqueued; the second one is not device memory.
  const std::vector<CopyPiece> pieces = {{host_, data_, 100}, {host_ + 300, host_ + 600, 100}};
  EXPECT_THAT(device_.CopyAsync(CopyDirection::kDeviceToHost, pieces, stream_),
              StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_EQ(fake_.calls("StreamSynchronize"), 1);
}

TEST_F(CudaCopiesTest, AFailedCopyIsWaitedForWithoutSpoilingSomebodysCapture) {
  fake_.SetCapturing(device_.CreateStream("captured").value(), true);
  fake_.FailNext("MemcpyAsync", cudaErrorMemoryAllocation);
  EXPECT_THAT(CopyTwoPieces(), StatusIs(absl::StatusCode::kResourceExhausted));
  EXPECT_EQ(fake_.calls("StreamSynchronize"), 1);
  EXPECT_FALSE(fake_.capture_spoiled());
}

// A failed single call enqueued nothing, and a broken device writes nothing: no wait is needed.
TEST_F(CudaCopiesTest, AFailureThatNothingCanFollowIsNotWaitedFor) {
  fake_.FailNext("MemcpyAsync", cudaErrorInvalidValue);
  EXPECT_THAT(device_.CopyAsync(CopyDirection::kHostToDevice, {&two_pieces_[0], 1}, stream_),
              StatusIs(absl::StatusCode::kInvalidArgument));
  fake_.FailNext("MemcpyAsync", cudaErrorIllegalAddress);
  EXPECT_THAT(CopyTwoPieces(), StatusIs(absl::StatusCode::kInternal));
  EXPECT_EQ(fake_.calls("StreamSynchronize"), 0);
}

TEST_F(CudaCopiesTest, AFailedCopyThatCannotBeWaitedForIsAsBadAsABrokenDevice) {
  fake_.FailNext("MemcpyAsync", cudaErrorMemoryAllocation);
  fake_.FailNext("StreamSynchronize", cudaErrorDevicesUnavailable);
  EXPECT_THAT(CopyTwoPieces(), StatusIs(absl::StatusCode::kInternal,
                                        AllOf(HasSubstr("cudaErrorMemoryAllocation"),
                                              HasSubstr("could not be waited for"),
                                              HasSubstr("cudaErrorDevicesUnavailable"))));
}

TEST_F(CudaCopiesTest, ACopyOfNothingIsRefused) {
  EXPECT_THAT(device_.CopyAsync(CopyDirection::kHostToDevice, {}, stream_),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no pieces: give one")));
}

}  // namespace
}  // namespace pinion
