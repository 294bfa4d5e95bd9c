// A PinnedAllocator with 4 MiB segments from a FakeSource, on a FakeHost with ample RAM, and a
// timeline. The teardown completes the timeline and expects that all memory was returned.
//
//   MakeWithLimit(8 * kMiB);              // makes the allocator anew with the current options
//   const PinnedBlock block = Take(kMiB - kSlack);
//   EXPECT_EQ(Stats().pin_calls, 1u);

#ifndef PINION_TESTS_ALLOCATOR_PINNED_ALLOCATOR_FIXTURE_H_
#define PINION_TESTS_ALLOCATOR_PINNED_ALLOCATOR_FIXTURE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/allocator_stats.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/tests/support/allocator_invariants.h"
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
    SetAvailableRam(99 * kGiB);
    Make();
  }
  ~PinnedAllocatorFixture() override {
    source_->on_allocate = source_->on_free = nullptr;
    timeline_->CompleteVisibly(UINT64_MAX);
    allocator_.reset();
    EXPECT_EQ(source_->outstanding_bytes(), 0u);
  }

  void Make() { MakeOver(source_); }
  void MakeWithLimit(uint64_t max_locked_bytes) {
    options_.max_locked_bytes = max_locked_bytes;
    Make();
  }
  void MakeWithSegments(uint64_t segment_bytes) {
    options_.segment_bytes = segment_bytes;
    Make();
  }
  void MakeWithWait(absl::Duration max_wait_for_deferred) {
    options_.max_wait_for_deferred = max_wait_for_deferred;
    Make();
  }
  void MakeOver(const std::shared_ptr<HostMemorySource>& source) {
    PINION_ASSERT_OK_AND_ASSIGN(allocator_,
                                PinnedAllocator::Create(options_, source, host_.Probe()));
  }

  PinnedBlock Take(uint64_t size_bytes) {
    absl::StatusOr<PinnedBlock> block = allocator_->Allocate(size_bytes);
    EXPECT_THAT(block, IsOk());
    EXPECT_THAT(CheckInvariants(Stats()), IsOk());
    return block.ok() ? *std::move(block) : PinnedBlock();
  }
  std::vector<PinnedBlock> TakeMany(int count, uint64_t size_bytes) {
    std::vector<PinnedBlock> blocks;
    for (int i = 0; i < count; ++i) blocks.push_back(Take(size_bytes));
    return blocks;
  }

  AllocatorStats Stats() const { return allocator_->GetStats(); }

  // Of 100 GiB.
  void SetAvailableRam(uint64_t bytes) { host_.SetMeminfo(100 * kGiB, bytes); }

  static void OnAnotherThread(const std::function<void()>& body) { std::thread(body).join(); }

  AllocatorOptions options_;
  FakeHost host_;
  const std::shared_ptr<FakeSource> source_ = std::make_shared<FakeSource>();
  const std::shared_ptr<FakeTimeline> timeline_ = std::make_shared<FakeTimeline>();
  std::shared_ptr<PinnedAllocator> allocator_;
};

}  // namespace pinion::testing

#endif  // PINION_TESTS_ALLOCATOR_PINNED_ALLOCATOR_FIXTURE_H_
