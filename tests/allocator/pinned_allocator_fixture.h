// A PinnedAllocator with 4 MiB segments from a FakeSource, on a FakeHost with ample RAM, and a
// timeline. The teardown expects that all memory was returned.
//
//   options_.max_locked_bytes = 8 * kMiB;
//   Make();                               // makes the allocator anew with the current options
//   const PinnedBlock block = Take(kMiB - kSlack);

#ifndef PINION_TESTS_ALLOCATOR_PINNED_ALLOCATOR_FIXTURE_H_
#define PINION_TESTS_ALLOCATOR_PINNED_ALLOCATOR_FIXTURE_H_

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/allocator_stats.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/tests/support/fake_host.h"
#include "pinion/tests/support/fake_source.h"
#include "pinion/tests/support/fake_timeline.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {

// Bytes left for the red zone of hardened builds, so that all builds have the same block sizes.
inline constexpr uint64_t kSlack = 128;

class PinnedAllocatorFixture : public ::testing::Test {
 protected:
  PinnedAllocatorFixture() {
    options_.segment_bytes = 4 * kMiB;
    host_.SetMeminfo(100 * kGiB, 99 * kGiB);
    Make();
  }
  ~PinnedAllocatorFixture() override {
    allocator_.reset();
    EXPECT_EQ(source_->outstanding_bytes(), 0u);
  }

  void Make() {
    absl::StatusOr<std::shared_ptr<PinnedAllocator>> made =
        PinnedAllocator::Create(options_, source_, host_.Probe());
    ASSERT_THAT(made, IsOk());
    allocator_ = *std::move(made);
  }

  PinnedBlock Take(uint64_t size_bytes) {
    absl::StatusOr<PinnedBlock> block = allocator_->Allocate(size_bytes);
    EXPECT_THAT(block, IsOk());
    EXPECT_THAT(allocator_->GetStats().CheckInvariants(), IsOk());
    return block.ok() ? *std::move(block) : PinnedBlock();
  }

  AllocatorOptions options_;
  FakeHost host_;
  const std::shared_ptr<FakeSource> source_ = std::make_shared<FakeSource>();
  const std::shared_ptr<FakeTimeline> timeline_ = std::make_shared<FakeTimeline>();
  std::shared_ptr<PinnedAllocator> allocator_;
};

}  // namespace pinion::testing

#endif  // PINION_TESTS_ALLOCATOR_PINNED_ALLOCATOR_FIXTURE_H_
