// How much the allocator pins at each growth, and when it unpins.

#include <atomic>
#include <barrier>
#include <cstdint>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/allocator_stats.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/config/build_config.h"
#include "pinion/tests/allocator/pinned_allocator_fixture.h"
#include "pinion/tests/support/allocator_invariants.h"
#include "pinion/tests/support/fake_source.h"
#include "pinion/tests/support/run_threads.h"
#include "pinion/tests/support/status_matchers.h"
#include "pinion/tests/support/status_says.h"

namespace pinion {
namespace {

using ::pinion::testing::CheckInvariants;
using ::pinion::testing::FakeSource;
using ::pinion::testing::IsExhausted;
using ::pinion::testing::IsInternalError;
using ::pinion::testing::IsOk;
using ::pinion::testing::IsOkAndHolds;
using ::pinion::testing::kSlack;
using ::pinion::testing::PinnedAllocatorFixture;
using ::testing::ElementsAre;

using PinnedAllocatorGrowthTest = PinnedAllocatorFixture;

TEST_F(PinnedAllocatorGrowthTest, ALargeRequestGetsASegmentOfItsOwnSize) {
  Take(13 * kMiB - kSlack);
  EXPECT_EQ(source_->outstanding_bytes(), 13 * kMiB);
}

TEST_F(PinnedAllocatorGrowthTest, SmallRequestsShareASegmentWithLargeOnes) {
  const PinnedBlock small = Take(100);
  const PinnedBlock large = Take(3 * kMiB);
  EXPECT_EQ(source_->calls(), 1u);
}

// A first segment of `segment_bytes` would pin 1 GiB, and take half a second, for the first 4 KiB.
TEST_F(PinnedAllocatorGrowthTest, AJobOf200MebibytesLocks256) {
  MakeWithSegments(kGiB);
  const PinnedBlock first = Take(4 * kKiB);
  EXPECT_EQ(source_->outstanding_bytes(), 64 * kMiB);
  const std::vector<PinnedBlock> blocks = TakeMany(200, kMiB - kSlack);
  EXPECT_EQ(source_->outstanding_bytes(), 256 * kMiB);
  EXPECT_EQ(source_->calls(), 3u);
}

TEST_F(PinnedAllocatorGrowthTest, GrowthsDoubleWhatIsLockedUpToASegment) {
  if (config::kHardened) GTEST_SKIP() << "hardened builds fill gigabytes";
  MakeWithSegments(384 * kMiB);
  std::vector<PinnedBlock> blocks;
  std::vector<uint64_t> locked_mib;
  while (source_->outstanding_bytes() < 1280 * kMiB) {
    blocks.push_back(Take(16 * kMiB));
    const uint64_t now_mib = source_->outstanding_bytes() / kMiB;
    if (locked_mib.empty() || locked_mib.back() != now_mib) locked_mib.push_back(now_mib);
  }
  EXPECT_THAT(locked_mib, ElementsAre(64, 128, 256, 512, 896, 1280));
}

// A source that registers memory can join only segments that begin at multiples of 1 GiB.
TEST_F(PinnedAllocatorGrowthTest, OddSizesLeaveWhatIsLockedAPowerOfTwo) {
  if (config::kHardened) GTEST_SKIP() << "hardened builds fill gigabytes";
  MakeWithSegments(kGiB);
  const PinnedBlock first = Take(70 * kMiB);
  EXPECT_EQ(source_->outstanding_bytes(), 128 * kMiB);
  const PinnedBlock second = Take(150 * kMiB);
  EXPECT_EQ(source_->outstanding_bytes(), 512 * kMiB);
  const PinnedBlock third = Take(kGiB + 2 * kMiB - kSlack);
  EXPECT_GE(source_->outstanding_bytes(), 512 * kMiB + kGiB + 2 * kMiB);
}

TEST_F(PinnedAllocatorGrowthTest, AfterAReservationAGrowthGoesToTheNextPowerOfTwoThatIsNotNear) {
  for (const uint64_t reserved_mib : {200, 120}) {
    SCOPED_TRACE(reserved_mib);
    MakeWithSegments(kGiB);
    EXPECT_THAT(allocator_->Reserve(reserved_mib * kMiB), IsOk());
    const PinnedBlock reserved = Take(reserved_mib * kMiB - kSlack);
    const PinnedBlock more = Take(kMiB - kSlack);
    EXPECT_EQ(source_->outstanding_bytes(), 256 * kMiB);
  }
}

TEST_F(PinnedAllocatorGrowthTest, AReservationIsOnePieceThatIsPinnedByOneCall) {
  for (const uint64_t segment_bytes : {kGiB, 4 * kMiB}) {
    SCOPED_TRACE(segment_bytes);
    MakeWithSegments(segment_bytes);
    const uint64_t calls = source_->calls();
    EXPECT_THAT(allocator_->Reserve(200 * kMiB), IsOk());
    EXPECT_EQ(source_->outstanding_bytes(), 200 * kMiB);
    Take(200 * kMiB - kSlack);
    EXPECT_EQ(source_->calls(), calls + 1);
  }
}

// A growth is cut to the rest of the limit even if the rest is far below the locked bytes.
TEST_F(PinnedAllocatorGrowthTest, ADoublingIsCutToWhatIsLeftOfTheLimit) {
  options_.segment_bytes = kGiB;
  MakeWithLimit(200 * kMiB);
  std::vector<PinnedBlock> blocks = TakeMany(199, kMiB - kSlack);
  EXPECT_EQ(source_->outstanding_bytes(), 200 * kMiB);
  EXPECT_EQ(Stats().growth_retries, 0u);
}

// Without this, a run whose longest block grows would keep every earlier length locked.
TEST_F(PinnedAllocatorGrowthTest, ALongSegmentThatIsFreeMakesWayForALongerOne) {
  if (config::kHardened) GTEST_SKIP() << "hardened builds fill gigabytes";
  Take(kGiB - kSlack);
  Take(kGiB + 64 * kMiB);
  Take(kGiB + 256 * kMiB);
  EXPECT_EQ(Stats().unpin_calls, 1u);
  EXPECT_EQ(Stats().locked_bytes.current, kGiB + kGiB + 256 * kMiB);
}

TEST_F(PinnedAllocatorGrowthTest, ALongBlockCostsNothingOfWhatWasReserved) {
  if (config::kHardened) GTEST_SKIP() << "hardened builds fill gigabytes";
  EXPECT_THAT(allocator_->Reserve(2 * kGiB), IsOk());
  Take(kGiB + 64 * kMiB);
  EXPECT_EQ(Stats().unpin_calls, 0u);
}

TEST_F(PinnedAllocatorGrowthTest, ThreadsThatFindNothingAtOncePinOneSegment) {
  constexpr int kThreads = 8;
  MakeWithSegments(16 * kMiB);  // without a limit, which would refuse a second segment
  std::atomic<int> asking{0};
  source_->on_allocate = [&asking] {
    while (asking < kThreads) std::this_thread::yield();
    absl::SleepFor(absl::Milliseconds(20));
  };
  testing::RunThreads(kThreads, [&](int) {
    ++asking;
    EXPECT_THAT(allocator_->Allocate(kMiB), IsOk());
  });
  EXPECT_EQ(source_->calls(), 1u);
  EXPECT_EQ(Stats().failures, 0u);
}

TEST_F(PinnedAllocatorGrowthTest, RoomForAReservationIsNotTakenByEmptySlabs) {
  MakeWithLimit(4 * kMiB);
  Take(100);
  EXPECT_THAT(allocator_->Reserve(4 * kMiB), IsOk());
  EXPECT_EQ(source_->calls(), 1u);
}

// Other allocators deadlocked here: creating an event called back into the allocator (mlx#2232), or
// a lock was held across cudaHostAlloc (TRT-LLM#17773).
TEST_F(PinnedAllocatorGrowthTest, TheSourceMayUseTheAllocatorThatCallsIt) {
  const PinnedBlock warm = Take(100);
  source_->on_allocate = [this] {
    (void)Stats();
    const PinnedBlock inner = Take(200);
    EXPECT_THAT(allocator_->Trim(UINT64_MAX), IsOk());
  };
  Take(kMiB);
}

TEST_F(PinnedAllocatorGrowthTest, WhatIsReservedIsServedWithoutPinning) {
  EXPECT_THAT(allocator_->Reserve(10 * kMiB), IsOk());
  const uint64_t calls = source_->calls();
  TakeMany(10, kMiB - kSlack);
  EXPECT_EQ(source_->calls(), calls);
  EXPECT_EQ(Stats().misses, 0u);
  EXPECT_EQ(Stats().failures, 0u);
}

TEST_F(PinnedAllocatorGrowthTest, AReserveAsksTheDeviceBeforeItGrows) {
  Take(kMiB).ReleaseAfter({timeline_->Ticket(1)});
  timeline_->CompleteOnDevice(1);
  EXPECT_THAT(allocator_->Reserve(4 * kMiB), IsOk());
  EXPECT_EQ(source_->calls(), 1u);
}

// A growth must not unpin the long segment of an earlier growth, or each growth would do so.
TEST_F(PinnedAllocatorGrowthTest, WhatIsReservedBesideALongSegmentAddsToIt) {
  EXPECT_THAT(allocator_->Reserve(10 * kMiB), IsOk());
  EXPECT_THAT(allocator_->Reserve(16 * kMiB), IsOk());
  EXPECT_EQ(source_->outstanding_bytes(), 16 * kMiB);
  EXPECT_EQ(source_->calls(), 2u);
}

// Memory that Trim is returning is neither free nor below the limit. An allocation in between must
// wait: a refusal would be wrong, because no block is in use.
TEST_F(PinnedAllocatorGrowthTest, WhoeverMissesDuringATrimWaitsForWhatItGivesBack) {
  MakeWithLimit(8 * kMiB);
  Take(8 * kMiB - kSlack);
  std::thread other;
  std::atomic<bool> asks{false};
  std::atomic<bool> was_answered{false};
  absl::Status status;
  source_->on_free = [&] {
    if (other.joinable()) return;
    other = std::thread([&] {
      asks = true;
      status = allocator_->Allocate(8 * kMiB - kSlack).status();
      was_answered = true;
    });
    while (!asks) std::this_thread::yield();
    // Long enough for a wrong refusal. A thread that waits is served after this callback.
    for (int ms = 0; ms < 100 && !was_answered; ++ms) absl::SleepFor(absl::Milliseconds(1));
  };
  EXPECT_THAT(allocator_->Trim(0), IsOkAndHolds(8 * kMiB));
  ASSERT_TRUE(other.joinable());
  other.join();
  EXPECT_THAT(status, IsOk());
  EXPECT_EQ(Stats().limit_refusals, 0u);
}

// A program's callback may trim every cache or allocate elsewhere. Two such allocators must not
// wait for each other's growth.
TEST_F(PinnedAllocatorGrowthTest, TwoAllocatorsThatGrowMayTrimEachOtherAndAllocateFromEachOther) {
  const auto other_source = std::make_shared<FakeSource>();
  const auto other = PinnedAllocator::Create(options_, other_source, host_.Probe()).value();
  std::barrier both_grow(2);
  const auto calls = [&both_grow](PinnedAllocator& called) {
    return [&both_grow, &called] {
      static thread_local bool is_nested = false;
      if (std::exchange(is_nested, true)) return;
      both_grow.arrive_and_wait();
      EXPECT_THAT(called.Trim(0), IsOk());
      EXPECT_THAT(called.Allocate(kMiB), IsOk());
      is_nested = false;
    };
  };
  source_->on_allocate = calls(*other);
  other_source->on_allocate = calls(*allocator_);
  testing::RunThreads(2, [&](int thread) {
    EXPECT_THAT((thread == 0 ? *allocator_ : *other).Allocate(kMiB), IsOk());
  });
}

TEST_F(PinnedAllocatorGrowthTest, ASourceMayTrimAndAllocateWhileItTakesMemoryBack) {
  MakeWithLimit(8 * kMiB);
  Take(8 * kMiB - kSlack);
  absl::Status status;
  source_->on_free = [&] {
    EXPECT_THAT(allocator_->Trim(0), IsOk());
    status = allocator_->Allocate(8 * kMiB - kSlack).status();
  };
  EXPECT_THAT(allocator_->Trim(0), IsOk());
  EXPECT_THAT(status, IsExhausted()) << "it has it still itself";
}

TEST_F(PinnedAllocatorGrowthTest, TrimGivesBackWhatIsFreeDownToWhatIsKept) {
  TakeMany(4, 4 * kMiB - kSlack);
  EXPECT_THAT(allocator_->Trim(8 * kMiB), IsOkAndHolds(8 * kMiB));
  EXPECT_EQ(source_->outstanding_bytes(), 8 * kMiB);
  EXPECT_THAT(allocator_->Trim(8 * kMiB), IsOkAndHolds(0u));
  EXPECT_EQ(Stats().trims, 1u);
}

class LostSegmentTest : public PinnedAllocatorFixture {
 protected:
  // A segment of 4 MiB that the source fails to free. It may still be pinned.
  void LoseASegment() {
    MakeOver(leaking_);
    Take(kMiB);
    leaking_->FailEveryFree();
    EXPECT_THAT(allocator_->Trim(0), IsInternalError());
  }

  const std::shared_ptr<FakeSource> leaking_ = std::make_shared<FakeSource>();
};

TEST_F(LostSegmentTest, IsCountedAsLeaked) {
  LoseASegment();
  EXPECT_EQ(Stats().leaked_bytes, 4 * kMiB);
  EXPECT_EQ(Stats().locked_bytes.current, 0u);
  EXPECT_THAT(CheckInvariants(Stats()), IsOk());
}

TEST_F(LostSegmentTest, CountsAgainstTheLimit) {
  options_.max_locked_bytes = 8 * kMiB;
  LoseASegment();
  const PinnedBlock block = Take(4 * kMiB - kSlack);
  EXPECT_THAT(allocator_->Allocate(kMiB), IsExhausted("max_locked_bytes"));
  EXPECT_EQ(leaking_->outstanding_bytes(), 8 * kMiB);
}

TEST_F(LostSegmentTest, LeavesTheNextSegmentTheRestOfTheLimit) {
  options_.max_locked_bytes = 5 * kMiB;
  LoseASegment();
  const PinnedBlock block = Take(kMiB / 2);
  EXPECT_EQ(leaking_->outstanding_bytes(), 5 * kMiB);
  EXPECT_EQ(Stats().growth_retries, 0u);
}

TEST_F(PinnedAllocatorGrowthTest, OncePeakDemandStoppedRisingNoStepPins) {
  // Each step allocates new sizes up to the same peak. Half of the blocks wait for copies.
  constexpr uint64_t kPeakBytes = 2 * kMiB;
  MakeWithSegments(512 * kKiB);
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
    timeline_->CompleteVisibly(ticket);  // as if the engine polled at its next submission
  };
  for (int i = 0; i < 50; ++i) step();
  const uint64_t pin_calls = Stats().pin_calls;
  for (int i = 0; i < 1000; ++i) step();
  EXPECT_EQ(Stats().pin_calls, pin_calls);
  EXPECT_LE(8 * Stats().booked_bytes.peak, 9 * Stats().requested_bytes.peak);
}

}  // namespace
}  // namespace pinion
