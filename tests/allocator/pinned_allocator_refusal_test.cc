// Growth that a limit, the host's RAM or the source refuses.

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/allocator_stats.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/allocator/ram/host_ledger.h"
#include "pinion/allocator/ram/host_ram.h"
#include "pinion/tests/allocator/pinned_allocator_fixture.h"
#include "pinion/tests/support/allocator_invariants.h"
#include "pinion/tests/support/fake_source.h"
#include "pinion/tests/support/status_matchers.h"
#include "pinion/tests/support/status_says.h"

namespace pinion {
namespace {

using ::pinion::testing::CheckInvariants;
using ::pinion::testing::FakeSource;
using ::pinion::testing::IsExhausted;
using ::pinion::testing::IsInvalid;
using ::pinion::testing::IsOk;
using ::pinion::testing::IsOkAndHolds;
using ::pinion::testing::IsUnavailable;
using ::pinion::testing::kSlack;
using ::pinion::testing::PinnedAllocatorFixture;
using ::testing::ElementsAre;
using ::testing::Not;

using PinnedAllocatorRefusalTest = PinnedAllocatorFixture;

TEST_F(PinnedAllocatorRefusalTest, TheLimitIsKeptAndNamed) {
  MakeWithLimit(8 * kMiB);
  const PinnedBlock block = Take(5 * kMiB);
  EXPECT_THAT(allocator_->Allocate(4 * kMiB),
              IsExhausted("allocate 4 MiB", "max_locked_bytes, 8 MiB: raise it", "are locked"));
  EXPECT_EQ(Stats().limit_refusals, 1u);
  EXPECT_EQ(Stats().watermark_refusals, 0u);
  EXPECT_EQ(Stats().source_refusals, 0u);
  EXPECT_EQ(Stats().growth_retries, 0u);
  EXPECT_EQ(Stats().failures, 1u);
  EXPECT_EQ(Stats().pin_calls, 1u);
}

TEST_F(PinnedAllocatorRefusalTest, WhatTheSourceRefusedDoesNotCountAgainstTheLimit) {
  MakeWithLimit(4 * kMiB);
  for (const uint64_t call : {0, 1, 2}) source_->FailCall(call);
  while (source_->calls() < 3) EXPECT_THAT(allocator_->Allocate(4 * kMiB - kSlack), Not(IsOk()));
  Take(4 * kMiB - kSlack);
}

TEST_F(PinnedAllocatorRefusalTest, NearTheLimitASegmentIsNoLargerThanItsBlock) {
  options_.max_locked_bytes = 5 * kMiB + 100;  // not a multiple of the granularity
  Make();
  const PinnedBlock block = Take(4 * kMiB - kSlack);
  const PinnedBlock second = Take(kMiB / 2);
  EXPECT_EQ(source_->outstanding_bytes(), 5 * kMiB);
  EXPECT_EQ(Stats().growth_retries, 0u);
}

TEST_F(PinnedAllocatorRefusalTest, CachedSegmentsMakeRoomUnderTheLimit) {
  MakeWithLimit(8 * kMiB);
  Take(100);  // in a segment of 4 MiB
  Take(7 * kMiB - kSlack);
  EXPECT_EQ(Stats().trims, 1u);
  EXPECT_EQ(Stats().unpin_calls, 1u);
  EXPECT_EQ(Stats().growth_retries, 1u);
  EXPECT_EQ(Stats().limit_refusals, 0u);
  EXPECT_EQ(Stats().locked_bytes.current, 7 * kMiB);
}

// Unpinning that does not help would make every step pin the same memory again.
TEST_F(PinnedAllocatorRefusalTest, NothingGoesBackForAGrowthThatWouldStillBeRefused) {
  MakeWithLimit(8 * kMiB);
  const PinnedBlock used = Take(3 * kMiB);
  Take(3 * kMiB);  // in a second segment, which is free again
  EXPECT_THAT(allocator_->Allocate(6 * kMiB), IsExhausted());
  EXPECT_EQ(Stats().unpin_calls, 0u);
  EXPECT_EQ(Stats().locked_bytes.current, 8 * kMiB);
}

// If a whole segment does not fit, a smaller one is still better than one of the block's size: the
// next blocks need no further pin call.
TEST_F(PinnedAllocatorRefusalTest, NearTheHighMarkOrInASmallCgroupSegmentsAreSmaller) {
  options_.segment_bytes = 16 * kMiB + 8 * 4096;  // a sixteenth is no multiple of 4096
  Make();
  SetAvailableRam(10 * kGiB + 8 * kMiB);
  Take(kMiB / 2);
  EXPECT_EQ(source_->outstanding_bytes(), kMiB);
  Make();
  SetAvailableRam(99 * kGiB);
  host_.Write("proc/self/cgroup", "0::/pod\n");
  host_.Write("cgroup/pod/memory.max", std::to_string(8 * kMiB));
  host_.Write("cgroup/pod/memory.current", "0\n");
  Take(kMiB / 2);
  EXPECT_EQ(source_->outstanding_bytes(), kMiB);
}

// Sessions and the C interface pass options, but no HostRam.
TEST_F(PinnedAllocatorRefusalTest, WhatIsBeingPinnedCountsInTheLedgerOfTheDirectory) {
  options_.ledger_directory = host_.root().string();
  Make();
  const HostLedger others = host_.Ram().ledger;
  uint64_t being_pinned = 0;
  source_->on_allocate = [&] { being_pinned = others.reserved_bytes(); };
  const PinnedBlock block = Take(kMiB);
  EXPECT_GE(being_pinned, kMiB);
  EXPECT_EQ(others.reserved_bytes(), 0u);
}

TEST_F(PinnedAllocatorRefusalTest, ADirectoryThatIsNotThereIsNamed) {
  options_.ledger_directory = "/no/such/directory";
  EXPECT_THAT(PinnedAllocator::Create(options_, source_, host_.Probe()),
              IsUnavailable("AllocatorOptions::ledger_directory is /no/such/directory",
                            "open of /no/such/directory/"));
}

class OthersThatPinTest : public PinnedAllocatorFixture {
 protected:
  // The others are about to pin 1 GiB.
  void MakeBesideThem(uint64_t available_bytes) {
    SetAvailableRam(available_bytes);
    others_.emplace(ram_.ledger.Reserve(kGiB));
    PINION_ASSERT_OK_AND_ASSIGN(allocator_, PinnedAllocator::Create(options_, source_, ram_));
  }

  const HostRam ram_ = host_.Ram();
  std::optional<HostLedger::Reservation> others_;
};

// One wait must cover all of the smaller segments that are tried.
TEST_F(OthersThatPinTest, AreWaitedForOnce) {
  MakeBesideThem(11 * kGiB);
  EXPECT_THAT(allocator_->Allocate(100 * kKiB), IsExhausted());
  EXPECT_EQ(Stats().growth_waits, 1u);
  EXPECT_EQ(Stats().growth_retries, 0u);
}

// 20 MiB fit at a time. A reservation of 64 MiB must consist of few large segments, and must wait
// only once for memory that others are about to pin.
TEST_F(OthersThatPinTest, AreWaitedForOnceByAReserveThatPinsNoCrumbs) {
  MakeBesideThem(11 * kGiB + 20 * kMiB);
  EXPECT_THAT(allocator_->Reserve(64 * kMiB), IsOk());
  EXPECT_EQ(source_->calls(), 4u);
  EXPECT_EQ(Stats().growth_waits, 1u);
}

// As ranks meet that reserve at the same time: each sees the other's pin in the ledger and in the
// kernel's numbers. The callback is called by the samples of the second segment: by the one before
// its reservation, and by the one that refuses it.
TEST_F(OthersThatPinTest, AreWaitedForByEverySegmentOfAReserve) {
  options_.on_ram_level = [this](const RamLevelChange& change) {
    if (change.to == RamLevel::kNormal) {
      others_.reset();
    } else {
      SetAvailableRam(50 * kGiB);
    }
  };
  source_->on_allocate = [this] {
    if (source_->calls() != 0) return;
    others_.emplace(ram_.ledger.Reserve(40 * kGiB));
    SetAvailableRam(35 * kGiB);
  };
  SetAvailableRam(50 * kGiB);
  PINION_ASSERT_OK_AND_ASSIGN(allocator_, PinnedAllocator::Create(options_, source_, ram_));
  EXPECT_THAT(allocator_->Reserve(kGiB + 20 * kMiB), IsOk());
  EXPECT_EQ(source_->calls(), 2u);
  EXPECT_EQ(Stats().growth_waits, 1u);
}

TEST_F(PinnedAllocatorRefusalTest, AReserveThatTheSourceRefusesInTheMiddleKeepsWhatItGot) {
  source_->LimitBytes(kGiB);
  EXPECT_THAT(allocator_->Reserve(kGiB + 20 * kMiB), IsExhausted("reserve 1.02 GiB"));
  EXPECT_EQ(Stats().locked_bytes.current, kGiB);
  EXPECT_EQ(Stats().failures, 1u);
}

TEST_F(PinnedAllocatorRefusalTest, AboveTheHighMarkOnlyTheCacheServesAndFreeSegmentsGoBack) {
  Take(kMiB);
  SetAvailableRam(5 * kGiB);
  {
    const PinnedBlock cached = Take(kMiB);
    EXPECT_THAT(allocator_->Allocate(8 * kMiB), IsExhausted("high_percent (90)"));
    EXPECT_EQ(Stats().watermark_refusals, 1u);
    EXPECT_EQ(Stats().limit_refusals, 0u);
    EXPECT_EQ(Stats().source_refusals, 0u);
    EXPECT_EQ(Stats().pin_calls, 1u);
  }
  EXPECT_THAT(allocator_->Allocate(8 * kMiB), Not(IsOk()));
  EXPECT_EQ(source_->outstanding_bytes(), 0u);
}

// The callback frees RAM after the refusal, before the allocator computes how much to unpin.
TEST_F(PinnedAllocatorRefusalTest, RamThatOthersGiveBackMeanwhileServes) {
  options_.on_ram_level = [&](const RamLevelChange& change) {
    if (change.to == RamLevel::kHigh) SetAvailableRam(50 * kGiB);
  };
  Make();
  SetAvailableRam(5 * kGiB);
  EXPECT_THAT(allocator_->Allocate(8 * kMiB), IsOk());
  EXPECT_EQ(Stats().growth_retries, 1u);
}

TEST_F(PinnedAllocatorRefusalTest, BelowTheHighMarkNothingGoesBackForAGrowthThatWouldPassItStill) {
  Take(kMiB);
  SetAvailableRam(10 * kGiB + 8 * kMiB);
  EXPECT_THAT(allocator_->Allocate(32 * kMiB), IsExhausted());
  EXPECT_EQ(Stats().unpin_calls, 0u);
}

TEST_F(PinnedAllocatorRefusalTest, WhatWhoeverIsToldOfALevelThrowsPassesThroughTheCall) {
  options_.on_ram_level = [](const RamLevelChange&) { throw std::runtime_error("the user's"); };
  Make();
  SetAvailableRam(5 * kGiB);
  EXPECT_THROW((void)allocator_->Allocate(8 * kMiB), std::runtime_error);
  SetAvailableRam(50 * kGiB);
  EXPECT_THROW((void)allocator_->Reserve(8 * kMiB), std::runtime_error);
  EXPECT_THAT(allocator_->Allocate(8 * kMiB), IsOk());
}

TEST_F(PinnedAllocatorRefusalTest, LevelsOfTheHostAreToldAndMayBeAnsweredByATrim) {
  std::vector<RamLevel> levels;
  options_.on_ram_level = [&](const RamLevelChange& change) {
    levels.push_back(change.to);
    if (change.to == RamLevel::kHigh) {
      EXPECT_THAT(allocator_->Trim(0), IsOk());
    }
  };
  Make();
  Take(kMiB);
  SetAvailableRam(5 * kGiB);
  EXPECT_THAT(allocator_->Trim(UINT64_MAX), IsOk());
  EXPECT_THAT(levels, ElementsAre(RamLevel::kHigh));
  EXPECT_EQ(source_->outstanding_bytes(), 0u);
}

TEST_F(PinnedAllocatorRefusalTest, GrowthAboveTheWarnMarkIsCounted) {
  SetAvailableRam(30 * kGiB);
  Take(kMiB);
  EXPECT_EQ(Stats().watermark_warnings, 1u);
}

TEST_F(PinnedAllocatorRefusalTest, AFailedPinTrimsAndIsRetriedOnce) {
  source_->LimitBytes(9 * kMiB);
  Take(100);  // in a segment of 4 MiB
  Take(8 * kMiB - kSlack);
  EXPECT_EQ(Stats().pin_failures, 1u);
  EXPECT_EQ(Stats().pin_calls, 3u);
  EXPECT_EQ(Stats().unpin_calls, 1u);
  EXPECT_EQ(Stats().growth_retries, 1u);
  EXPECT_EQ(Stats().source_refusals, 0u);
}

// Pinning all returned bytes in one call would hold the driver's lock for seconds.
TEST_F(PinnedAllocatorRefusalTest, TheSecondAttemptPinsNoMoreThanASegmentOrItsBlock) {
  TakeMany(6, 4 * kMiB - kSlack);
  source_->FailCall(source_->calls());
  Take(5 * kMiB - kSlack);
  EXPECT_EQ(source_->outstanding_bytes(), 5 * kMiB);  // of the 24 MiB that were unpinned
}

// The callback frees a block while the source refuses to pin more.
TEST_F(PinnedAllocatorRefusalTest, ABlockThatComesFreeWhileTheSourceRefusesServes) {
  PinnedBlock held = Take(2 * kMiB - kSlack);
  const PinnedBlock neighbour = Take(2 * kMiB - kSlack);  // keeps the segment
  source_->LimitBytes(source_->outstanding_bytes());
  source_->on_allocate = [&held] { held = PinnedBlock(); };
  const PinnedBlock block = Take(2 * kMiB - kSlack);
  // One attempt for a whole segment, one for the block's size.
  EXPECT_EQ(Stats().pin_failures, 2u);
  EXPECT_EQ(Stats().growth_retries, 0u);
  EXPECT_EQ(Stats().source_refusals, 0u);
}

// With so little left below the limit a whole segment is no larger than the block.
TEST_F(PinnedAllocatorRefusalTest, TheSourceIsNotAskedForTheSameSizeTwiceInARow) {
  options_.segment_bytes = kGiB;
  MakeWithLimit(4 * kMiB);
  source_->LimitBytes(kMiB);
  EXPECT_THAT(allocator_->Allocate(4 * kMiB - kSlack), IsExhausted());
  EXPECT_EQ(source_->calls(), 1u);
}

TEST_F(PinnedAllocatorRefusalTest, OfASourceThatHasRoomForLessSixteenthsAreTried) {
  MakeWithSegments(64 * kMiB);
  source_->LimitBytes(5 * kMiB);
  Take(100);
  EXPECT_EQ(source_->outstanding_bytes(), 4 * kMiB);
  EXPECT_EQ(source_->calls(), 2u);
}

// A reservation asks for few large segments, and must fail at once if they do not fit.
TEST_F(PinnedAllocatorRefusalTest, AReservationThatTheSourceRefusesPinsNoCrumbs) {
  source_->LimitBytes(20 * kMiB);
  EXPECT_THAT(allocator_->Reserve(64 * kMiB), IsExhausted());
  EXPECT_EQ(source_->calls(), 1u);
}

// If the source can still pin the block alone, free segments must not be unpinned for it.
TEST_F(PinnedAllocatorRefusalTest, WhatIsFreeStaysWhereTheSourceHasRoomForTheBlock) {
  const PinnedBlock held = Take(2 * kMiB - kSlack);  // in a segment of 4 MiB
  source_->LimitBytes(7 * kMiB);
  Take(3 * kMiB - kSlack);
  EXPECT_EQ(source_->outstanding_bytes(), 7 * kMiB);
  EXPECT_EQ(Stats().unpin_calls, 0u);
  EXPECT_EQ(Stats().growth_retries, 0u);
}

TEST_F(PinnedAllocatorRefusalTest, WhatTheSourceRefusesTwiceIsCounted) {
  source_->LimitBytes(kMiB);
  EXPECT_THAT(allocator_->Allocate(2 * kMiB), IsExhausted());
  EXPECT_EQ(Stats().source_refusals, 1u);
  EXPECT_EQ(source_->calls(), 2u);
  // The same size is not attempted twice.
  EXPECT_THAT(allocator_->Allocate(8 * kMiB), IsExhausted());
  EXPECT_EQ(source_->calls(), 3u);
}

TEST_F(PinnedAllocatorRefusalTest, WhereAWholeSegmentFailsOneOfTheBlocksSizeMayDo) {
  source_->LimitBytes(kMiB);
  Take(kMiB - kSlack);
  EXPECT_EQ(Stats().pin_calls, 2u);
  EXPECT_EQ(Stats().locked_bytes.current, kMiB);
}

// The source's 5 MiB are all pinned, in segments that are too short for the block.
TEST_F(PinnedAllocatorRefusalTest, WhatWasGivenBackIsGrownAtOnceOrElseTheBlocksSize) {
  for (const bool second_fails : {false, true}) {
    MakeWithSegments(8 * kMiB);
    source_->LimitBytes(5 * kMiB);
    TakeMany(5, kMiB - kSlack);
    if (second_fails) source_->FailCall(source_->calls() + 2);
    const PinnedBlock block = Take(3 * kMiB - kSlack);
    EXPECT_EQ(block.size_bytes(), 3 * kMiB - kSlack);
    EXPECT_EQ(source_->outstanding_bytes(), (second_fails ? 3 : 5) * kMiB);
  }
}

TEST_F(PinnedAllocatorRefusalTest, ABrokenSourceIsNotAskedAgain) {
  source_->FailCall(0, absl::StatusCode::kUnavailable);
  EXPECT_THAT(allocator_->Allocate(kMiB), IsUnavailable("fake failed to provide 4 MiB", "told to"));
  EXPECT_EQ(source_->calls(), 1u);
}

TEST_F(PinnedAllocatorRefusalTest, WhicheverPinCallFailsTheBooksStayRight) {
  options_.segment_bytes = 256 * kKiB;
  uint64_t calls = 0;
  for (uint64_t failing = 0; failing <= calls; ++failing) {
    SCOPED_TRACE(::testing::Message() << "call " << failing << " fails");
    const auto source = std::make_shared<FakeSource>();
    source->FailCall(failing);
    MakeOver(source);
    std::mt19937_64 random(1);
    std::vector<PinnedBlock> blocks;
    for (int i = 0; i < 40; ++i) {
      absl::StatusOr<PinnedBlock> block = allocator_->Allocate(1 + random() % (384 * kKiB));
      if (block.ok()) {
        blocks.push_back(*std::move(block));
      } else {
        ASSERT_THAT(block, IsExhausted());
      }
      if (i % 5 == 4) blocks.erase(blocks.begin(), blocks.begin() + 2);
      ASSERT_THAT(CheckInvariants(Stats()), IsOk());
      ASSERT_EQ(Stats().locked_bytes.current, source->outstanding_bytes());
    }
    EXPECT_EQ(Stats().pin_calls, source->calls());
    calls = source->calls();
    blocks.clear();
    EXPECT_THAT(allocator_->Trim(0), IsOk());
    EXPECT_EQ(source->outstanding_bytes(), 0u);
  }
}

TEST_F(PinnedAllocatorRefusalTest, WithoutTheOptionEveryBlockIsPinned) {
  EXPECT_TRUE(Take(kMiB).pinned());
  source_->LimitBytes(0);
  EXPECT_THAT(allocator_->Allocate(8 * kMiB), Not(IsOk()));
}

class PageableFallbackTest : public PinnedAllocatorFixture {
 protected:
  PageableFallbackTest() {
    options_.pageable_fallback = true;
    Make();
  }
};

TEST_F(PageableFallbackTest, ServesWhereTheSourceRefuses) {
  const PinnedBlock pinned = Take(4 * kMiB - kSlack);
  EXPECT_TRUE(pinned.pinned());
  source_->LimitBytes(0);
  {
    const PinnedBlock block = Take(5 * kMiB);
    EXPECT_FALSE(block.pinned());
    EXPECT_TRUE(allocator_->Owns(block.data()));
    std::memset(block.data(), 1, block.size_bytes());
  }
  Take(5 * kMiB);  // from the cache
  EXPECT_EQ(Stats().pageable_allocations, 2u);
  EXPECT_EQ(Stats().source_refusals, 2u);
  EXPECT_EQ(Stats().failures, 0u);
  EXPECT_EQ(Stats().locked_bytes.current, 4 * kMiB);
  EXPECT_EQ(Stats().pageable_bytes.current, 6 * kMiB);
  EXPECT_THAT(allocator_->Trim(4 * kMiB), IsOkAndHolds(6 * kMiB));
}

TEST_F(PageableFallbackTest, ServesWhereTheLimitRefuses) {
  options_.segment_bytes = kGiB;
  MakeWithLimit(4 * kMiB);
  EXPECT_FALSE(Take(5 * kMiB).pinned());
  EXPECT_EQ(Stats().limit_refusals, 1u);
  EXPECT_EQ(Stats().pageable_bytes.current, 64 * kMiB);
}

TEST_F(PageableFallbackTest, BlocksAreDeferredAndOutliveTheirAllocatorAsOthersDo) {
  source_->LimitBytes(0);
  Take(4 * kMiB - kSlack).ReleaseAfter({timeline_->Ticket(1)});
  timeline_->CompleteOnDevice(1);
  const PinnedBlock block = Take(4 * kMiB - kSlack);
  EXPECT_EQ(Stats().pageable_bytes.current, 4 * kMiB);
  allocator_.reset();
  std::memset(block.data(), 1, block.size_bytes());
}

TEST_F(PageableFallbackTest, TrimAsksTheDeviceWhetherItIsDoneWithABlock) {
  source_->LimitBytes(0);
  Take(4 * kMiB - kSlack).ReleaseAfter({timeline_->Ticket(1)});
  timeline_->CompleteOnDevice(1);
  EXPECT_THAT(allocator_->Trim(0), IsOkAndHolds(4 * kMiB));
  EXPECT_EQ(Stats().pageable_bytes.current, 0u);
}

// Pageable memory uses the host's RAM too. If RAM is short, the tensor must stay on the device.
TEST_F(PageableFallbackTest, ServesNothingAboveTheHighMarkEvenIfItIsCached) {
  source_->LimitBytes(0);
  EXPECT_FALSE(Take(5 * kMiB).pinned());  // and returned to the cache
  SetAvailableRam(5 * kGiB);
  EXPECT_THAT(allocator_->Allocate(5 * kMiB), IsExhausted("high_percent"));
  source_->LimitBytes(kGiB);
  Make();
  EXPECT_THAT(allocator_->Allocate(kMiB), IsExhausted("high_percent"));
  MakeWithLimit(kMiB);
  EXPECT_THAT(allocator_->Allocate(5 * kMiB), IsExhausted("high_percent"));
}

TEST_F(PageableFallbackTest, HasTheAlignmentOfItsOwnSource) {
  options_.alignment_bytes = 2 * kMiB;
  EXPECT_THAT(PinnedAllocator::Create(options_, std::make_shared<FakeSource>(2 * kMiB)), IsOk());
}

TEST_F(PageableFallbackTest, HasTheGranularityOfItsOwnSource) {
  options_.segment_bytes = 3 * kMiB;
  MakeWithLimit(4096);
  EXPECT_FALSE(Take(kMiB).pinned());
  EXPECT_EQ(Stats().pageable_bytes.current, 4 * kMiB);
  options_.alignment_bytes = options_.segment_bytes = 4 * kMiB;
  EXPECT_THAT(PinnedAllocator::Create(options_, std::make_shared<FakeSource>(4 * kMiB)),
              IsInvalid("pageable_fallback"));
}

}  // namespace
}  // namespace pinion
