// How much is pinned when, and when it goes back.

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/allocator_stats.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/config/build_config.h"
#include "pinion/tests/allocator/pinned_allocator_fixture.h"
#include "pinion/tests/support/fake_source.h"
#include "pinion/tests/support/fake_timeline.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace {

using ::pinion::testing::FakeSource;
using ::pinion::testing::FakeTimeline;
using ::pinion::testing::IsOk;
using ::pinion::testing::IsOkAndHolds;
using ::pinion::testing::kSlack;
using ::pinion::testing::PinnedAllocatorFixture;
using ::pinion::testing::StatusIs;

using PinnedAllocatorGrowthTest = PinnedAllocatorFixture;

TEST_F(PinnedAllocatorGrowthTest, ALargeRequestGetsASegmentOfItsOwnSize) {
  Take(13 * kMiB - kSlack);
  EXPECT_EQ(source_->outstanding_bytes(), 13 * kMiB);
}

TEST_F(PinnedAllocatorGrowthTest, SmallRequestsDoNotPinAWholeLargeSegment) {
  options_.segment_bytes = 64 * kMiB;
  Make();
  Take(100);
  EXPECT_EQ(source_->outstanding_bytes(), 2 * kMiB);
}

// Segments of 75 MiB, full of holes for blocks of 150: a run whose shapes change would lock what
// each shape needed, all at once.
TEST_F(PinnedAllocatorGrowthTest, FreeSegmentsThatAreTooShortBecomeOneThatIsNot) {
  {
    const PinnedBlock a = Take(4 * kMiB - kSlack);
    const PinnedBlock b = Take(4 * kMiB - kSlack);
    const PinnedBlock c = Take(4 * kMiB - kSlack);
  }
  const PinnedBlock first = Take(6 * kMiB - kSlack);
  const PinnedBlock second = Take(6 * kMiB - kSlack);
  const AllocatorStats stats = allocator_->GetStats();
  EXPECT_EQ(stats.locked_bytes.peak, 12 * kMiB);
  EXPECT_EQ(stats.pin_calls, 4u);
  EXPECT_EQ(stats.unpin_calls, 3u);
}

// An allocator called event creation, which called the allocator, and the lock was not recursive
// (mlx#2232); another held its lock across cudaHostAlloc, and a whole node waited (TRT-LLM#17773).
TEST_F(PinnedAllocatorGrowthTest, TheSourceMayUseTheAllocatorThatCallsIt) {
  const PinnedBlock warm = Take(100);
  source_->on_allocate = [this] {
    (void)allocator_->GetStats();
    const PinnedBlock inner = Take(200);
    EXPECT_THAT(allocator_->Trim(UINT64_MAX), IsOk());
  };
  Take(kMiB);
  source_->on_allocate = nullptr;
}

TEST_F(PinnedAllocatorGrowthTest, WhatIsReservedIsServedWithoutPinning) {
  EXPECT_THAT(allocator_->Reserve(10 * kMiB), IsOk());
  const uint64_t calls = source_->calls();
  std::vector<PinnedBlock> blocks;
  for (int i = 0; i < 10; ++i) blocks.push_back(Take(kMiB - kSlack));
  EXPECT_EQ(source_->calls(), calls);
  EXPECT_EQ(allocator_->GetStats().misses, 0u);
}

TEST_F(PinnedAllocatorGrowthTest, WhatIsReservedIsOnePieceWhereThatCanBeHad) {
  EXPECT_THAT(allocator_->Reserve(50 * kMiB), IsOk());
  Take(50 * kMiB - kSlack);
  EXPECT_EQ(source_->calls(), 1u);
}

TEST_F(PinnedAllocatorGrowthTest, TrimGivesBackWhatIsFreeDownToWhatIsKept) {
  {
    std::vector<PinnedBlock> blocks;
    for (int i = 0; i < 4; ++i) blocks.push_back(Take(4 * kMiB - kSlack));
  }
  EXPECT_THAT(allocator_->Trim(8 * kMiB), IsOkAndHolds(8 * kMiB));
  EXPECT_EQ(source_->outstanding_bytes(), 8 * kMiB);
  EXPECT_THAT(allocator_->Trim(8 * kMiB), IsOkAndHolds(0u));
  EXPECT_EQ(allocator_->GetStats().trims, 1u);
}

TEST_F(PinnedAllocatorGrowthTest, ASegmentThatCannotBeFreedIsCountedAsLeaked) {
  const auto source = std::make_shared<FakeSource>();
  PINION_ASSERT_OK_AND_ASSIGN(allocator_, PinnedAllocator::Create(options_, source, host_.Probe()));
  Take(kMiB);
  source->FailEveryFree();
  EXPECT_THAT(allocator_->Trim(0), StatusIs(absl::StatusCode::kInternal));
  const AllocatorStats stats = allocator_->GetStats();
  EXPECT_EQ(stats.leaked_bytes, 4 * kMiB);
  EXPECT_EQ(stats.locked_bytes.current, 0u);
  EXPECT_THAT(stats.CheckInvariants(), IsOk());
}

TEST_F(PinnedAllocatorGrowthTest, OncePeakDemandStoppedRisingNoStepPins) {
  // Each step holds blocks of new sizes, half of them until copies are done, up to the same peak.
  constexpr uint64_t kPeakBytes = 2 * kMiB;
  options_.segment_bytes = 512 * kKiB;
  Make();
  std::mt19937_64 random(2026);
  uint64_t ticket = 0;
  const auto step = [&] {
    std::vector<PinnedBlock> blocks;
    uint64_t held_bytes = 0;
    while (true) {
      const uint64_t size_bytes = 32 * kKiB + random() % (64 * kKiB);
      if (held_bytes + size_bytes > kPeakBytes) break;
      held_bytes += size_bytes;
      blocks.push_back(Take(size_bytes));
    }
    ++ticket;
    for (PinnedBlock& block : blocks) {
      if (random() % 2 == 0) std::move(block).ReleaseAfter({timeline_->Ticket(ticket)});
    }
    timeline_->CompleteVisibly(ticket);  // as when the engine polls at its next submission
  };
  for (int i = 0; i < 50; ++i) step();
  const uint64_t pin_calls = allocator_->GetStats().pin_calls;
  for (int i = 0; i < 1000; ++i) step();
  EXPECT_EQ(allocator_->GetStats().pin_calls, pin_calls);
  const AllocatorStats stats = allocator_->GetStats();
  EXPECT_LE(8 * stats.booked_bytes.peak, 9 * stats.requested_bytes.peak);
}

// Batches and sequences vary; blocks live through forward, and go in backward once late copies are
// done. Segments cut for one shape are useless to the next: this run used to lock twice its demand.
TEST_F(PinnedAllocatorGrowthTest, AThousandStepsOfVaryingShapesLockLittleMoreThanTheyNeed) {
  constexpr uint64_t kLayers = 12;
  constexpr size_t kLate = 8;                           // copies are seen so many releases later
  constexpr int kSteps = config::kHardened ? 5 : 1000;  // hardened: each byte is filled and checked
  options_.segment_bytes = kMiB;
  for (const uint64_t seed : {1, 2, 3, 4}) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    Make();
    std::mt19937_64 random(seed);
    const auto timeline = std::make_shared<FakeTimeline>();
    uint64_t ticket = 0;
    uint64_t demand_bytes = 0;
    uint64_t peak_demand_bytes = 0;
    std::deque<uint64_t> late;
    const auto finish_oldest = [&] {
      timeline->CompleteOnDevice(ticket - late.size() + 1);
      demand_bytes -= late.front();
      late.pop_front();
    };
    for (int step = 0; step < kSteps; ++step) {
      const uint64_t tokens = (1 + random() % 8) * (1 + random() % 16) * 64;
      std::vector<PinnedBlock> blocks;
      for (uint64_t i = 0; i < kLayers * 6; ++i) {
        constexpr uint64_t kBytesPerToken[] = {128, 384, 128, 128, 512, 512};
        if (!late.empty() && random() % 2 == 0) finish_oldest();
        blocks.push_back(*allocator_->Allocate(tokens * kBytesPerToken[i % 6]));
        demand_bytes += blocks.back().capacity_bytes();
        peak_demand_bytes = std::max(peak_demand_bytes, demand_bytes);
      }
      while (!blocks.empty()) {
        late.push_back(blocks.back().capacity_bytes());
        std::move(blocks.back()).ReleaseAfter({timeline->Ticket(++ticket)});
        blocks.pop_back();
        if (late.size() > kLate) finish_oldest();
      }
    }
    EXPECT_LE(allocator_->GetStats().locked_bytes.peak, peak_demand_bytes * 10 / 9 + 2 * kMiB);
    timeline->CompleteOnDevice(ticket);
  }
}

}  // namespace
}  // namespace pinion
