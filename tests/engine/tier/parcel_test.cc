// State transitions of a parcel: each one in the diagram in parcel.h, and forbidden ones. Readers:
// parcel_readers_test.cc. Threads: parcel_threads_test.cc.

#include "pinion/engine/tier/parcel.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/stream/wait_site.h"
#include "pinion/engine/tier/device_tier.h"
#include "pinion/engine/tier/guarded_memory.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/tests/engine/engine_world.h"
#include "pinion/tests/engine/tier/tier_world.h"
#include "pinion/tests/support/status_matchers.h"
#include "pinion/tests/support/test_waits.h"

namespace pinion::testing {
namespace parcel_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using State = Parcel::State;

constexpr uint64_t kBytes = 64 * kKiB;

class ParcelTest : public ::testing::Test {
 protected:
  ~ParcelTest() override { EXPECT_THAT(world_.machine().races(), races_); }

  // Copies two pieces out, each from its own memory, which others may share.
  std::shared_ptr<Parcel> PutOutTwoPieces() {
    Departure departure;
    departure.parcel = tiers_.tier().NewParcel(2 * kBytes, tiers_.stream()).value();
    for (uint64_t piece = 0; piece < 2; ++piece) {
      departure.memory.push_back(tiers_.NewMemory(Pattern(piece + 1, kBytes)));
      departure.pieces.push_back({departure.memory.back().data(), piece * kBytes, kBytes});
    }
    return tiers_.PutOut(std::move(departure));
  }
  uint64_t CopiesIn() { return world_.engine().GetStats().h2d.submitted_transfers; }

  EngineWorld world_;
  ::testing::Matcher<std::vector<std::string>> races_ = IsEmpty();  // at the end
  TierWorld tiers_{world_};
  Parcel::Reader reader_;
};

// -------------------------------------------------------------------------------------- offload

TEST_F(ParcelTest, ANewParcelHoldsNothingAndHasNoCopyToWaitFor) {
  PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Parcel> parcel,
                              tiers_.tier().NewParcel(kBytes, tiers_.stream()));
  EXPECT_EQ(parcel->state(), State::kNew);
  EXPECT_EQ(parcel->size_bytes, kBytes);
  EXPECT_EQ(parcel->stream, tiers_.stream());
  EXPECT_TRUE(parcel->copy_out().IsDone());
  EXPECT_FALSE(parcel->ShareHeld(0));
  EXPECT_FALSE(parcel->TakeHeld(0));
  EXPECT_FALSE(parcel->Evict());
  EXPECT_FALSE(parcel->TakeFetched());
  EXPECT_FALSE(parcel->ClaimIfAway().has_value());
  EXPECT_EQ(parcel->state(), State::kNew);
}

TEST_F(ParcelTest, AParcelThatLeavesHoldsTheMemoryThatItsCopyReads) {
  const std::shared_ptr<Parcel> parcel = tiers_.PutOut(Pattern(1, kBytes));
  EXPECT_EQ(parcel->state(), State::kHeld);
  EXPECT_FALSE(parcel->copy_out().IsDone());
  EXPECT_EQ(tiers_.live_blocks(), 1);
  EXPECT_EQ(tiers_.BytesIn(parcel->ShareHeld(0)), Pattern(1, kBytes));
  EXPECT_FALSE(parcel->ClaimIfAway().has_value()) << "there is nothing to fetch";
}

TEST_F(ParcelTest, AnEvictedParcelIsAwayAndItsMemoryGoesAfterTheCopyOut) {
  const std::shared_ptr<Parcel> parcel = tiers_.PutOut(Pattern(1, kBytes));
  {
    const GuardedMemory evicted = parcel->Evict();
    EXPECT_EQ(parcel->state(), State::kAway);
    EXPECT_EQ(evicted.copy().ticket().value, parcel->copy_out().ticket().value);
    EXPECT_EQ(tiers_.BytesIn(evicted.memory()), Pattern(1, kBytes)) << "no lock is held any more";
  }
  EXPECT_EQ(tiers_.live_blocks(), 0);
  EXPECT_FALSE(parcel->ShareHeld(0));
  EXPECT_FALSE(parcel->TakeHeld(0));
  EXPECT_FALSE(parcel->Evict()) << "once";
  EXPECT_EQ(parcel->state(), State::kAway);
}

TEST_F(ParcelTest, WithoutTheEvictionsWaitTheFreeIsARace) {
  const ScopedDisableWaitSite disabled(kEvictAfterCopyOut);
  tiers_.SendAway(Pattern(1, kBytes));
  races_ = ElementsAre(HasSubstr("copy D2H"));
}

TEST_F(ParcelTest, AParcelThatGoesLetsGoOfItsMemoryAfterTheCopyOut) {
  tiers_.PutOut(Pattern(1, kBytes));
  EXPECT_EQ(tiers_.live_blocks(), 0);
}

TEST_F(ParcelTest, PiecesCanBeLetGoOfOneByOne) {
  const std::shared_ptr<Parcel> parcel = PutOutTwoPieces();
  {
    const GuardedMemory first = parcel->TakeHeld(0);
    EXPECT_EQ(tiers_.BytesIn(first.memory()), Pattern(1, kBytes));
  }
  EXPECT_EQ(tiers_.live_blocks(), 1);
  EXPECT_FALSE(parcel->TakeHeld(0));
  EXPECT_FALSE(parcel->ShareHeld(0));
  EXPECT_EQ(tiers_.BytesIn(parcel->ShareHeld(1)), Pattern(2, kBytes));
  EXPECT_EQ(parcel->state(), State::kHeld);
  { const GuardedMemory rest = parcel->Evict(); }
  EXPECT_EQ(tiers_.live_blocks(), 0);
}

TEST_F(ParcelTest, AParcelWhosePiecesHaveAllGoneIsEvictedWithNothingToLetGoOf) {
  const std::shared_ptr<Parcel> parcel = tiers_.PutOut(Pattern(1, kBytes));
  { const GuardedMemory taken = parcel->TakeHeld(0); }
  EXPECT_EQ(parcel->state(), State::kHeld);
  EXPECT_FALSE(parcel->Evict());
  EXPECT_EQ(parcel->state(), State::kAway);
}

TEST_F(ParcelTest, AnEvictionCountsWhatItDoesNotFree) {
  const std::shared_ptr<Parcel> parcel = PutOutTwoPieces();
  const DeviceMemory others = parcel->ShareHeld(1);
  uint64_t not_freed = 5;
  { const GuardedMemory evicted = parcel->Evict(&not_freed); }
  EXPECT_EQ(not_freed, 6u);
  EXPECT_EQ(tiers_.live_blocks(), 1);
  EXPECT_EQ(tiers_.BytesIn(others), Pattern(2, kBytes));
}

// ---------------------------------------------------------------------------------------- fetch

TEST_F(ParcelTest, AParcelThatIsAwayIsClaimedOnceAndFetched) {
  const std::shared_ptr<Parcel> parcel = tiers_.SendAway(Pattern(1, kBytes), 1);
  std::optional<FetchClaim> claim = parcel->ClaimIfAway();
  ASSERT_TRUE(claim.has_value());
  EXPECT_EQ(&claim->parcel(), parcel.get());
  EXPECT_EQ(parcel->state(), State::kFetching);
  EXPECT_FALSE(parcel->ClaimIfAway().has_value());
  EXPECT_FALSE(parcel->TakeFetched());
  tiers_.Fetch(*std::move(claim));
  EXPECT_EQ(parcel->state(), State::kFetched);
  EXPECT_FALSE(parcel->ClaimIfAway().has_value());
  EXPECT_EQ(tiers_.live_blocks(), 1);
}

TEST_F(ParcelTest, AClaimFailsOnceAndLeavesTheNextOneAlone) {
  const std::shared_ptr<Parcel> parcel = tiers_.SendAway(Pattern(1, kBytes));
  std::optional<FetchClaim> claim = parcel->ClaimIfAway();
  claim->Fail();
  EXPECT_EQ(&claim->parcel(), parcel.get());
  EXPECT_EQ(parcel->state(), State::kAway);
  const std::optional<FetchClaim> next = parcel->ClaimIfAway();
  ASSERT_TRUE(next.has_value());
  claim.reset();
  EXPECT_EQ(parcel->state(), State::kFetching);
}

TEST_F(ParcelTest, WhoReadsFirstGetsTheClaimAndThenTheBytes) {
  const std::shared_ptr<Parcel> parcel = tiers_.SendAway(Pattern(1, kBytes), 2);
  {
    Parcel::Read first = parcel->ReadOrClaim(reader_);
    ASSERT_TRUE(first.claim.has_value());
    EXPECT_FALSE(first.fetched);
    EXPECT_EQ(parcel->state(), State::kFetching);
    tiers_.Fetch(*std::move(first.claim));
  }
  const Parcel::Read second = parcel->ReadOrClaim(reader_);
  EXPECT_FALSE(second.claim.has_value());
  ASSERT_TRUE(second.fetched);
  ASSERT_THAT(second.fetched.copy().WaitOn(tiers_.stream(), kReadAfterCopyIn), IsOk());
  EXPECT_EQ(tiers_.BytesIn(second.fetched.memory()), Pattern(1, kBytes));
  EXPECT_EQ(CopiesIn(), 1u);
}

TEST_F(ParcelTest, AClaimThatIsGivenUpLeavesTheParcelAwayForOthersToTry) {
  const std::shared_ptr<Parcel> parcel = tiers_.SendAway(Pattern(1, kBytes), 1);
  {
    const std::optional<FetchClaim> claim = parcel->ClaimIfAway();
    EXPECT_EQ(parcel->state(), State::kFetching);
  }
  EXPECT_EQ(parcel->state(), State::kAway);
  EXPECT_EQ(tiers_.Read(*parcel, reader_), Pattern(1, kBytes));
}

TEST_F(ParcelTest, AClaimThatWasMovedOrUsedUpGivesNothingUp) {
  const std::shared_ptr<Parcel> parcel = tiers_.SendAway(Pattern(1, kBytes), 1);
  std::optional<FetchClaim> claim = parcel->ClaimIfAway();
  {
    FetchClaim moved = *std::move(claim);
    claim.reset();
    EXPECT_EQ(parcel->state(), State::kFetching);
    EXPECT_FALSE(moved.EndFetch(
        GuardedMemory(tiers_.NewMemory(kBytes), tiers_.stream(), Transfer(), kFreeAfterCopy)));
  }
  EXPECT_EQ(parcel->state(), State::kFetched);
}

TEST_F(ParcelTest, AClaimKeepsTheParcelThatItIsFor) {
  std::shared_ptr<Parcel> parcel = tiers_.SendAway(Pattern(1, kBytes), 1);
  std::optional<FetchClaim> claim = parcel->ClaimIfAway();
  parcel.reset();
  EXPECT_EQ(claim->parcel().size_bytes, kBytes);
  tiers_.Fetch(*std::move(claim));
  EXPECT_EQ(tiers_.live_blocks(), 0) << "and with the claim it goes, and what was fetched";
  EXPECT_EQ(CopiesIn(), 1u);
}

TEST_F(ParcelTest, WhatWasFetchedCanBeTakenBackAndFetchedAgain) {
  const std::shared_ptr<Parcel> parcel = tiers_.SendAway(Pattern(1, kBytes), 1);
  tiers_.Fetch(*parcel->ClaimIfAway());
  { EXPECT_TRUE(parcel->TakeFetched()); }
  EXPECT_EQ(parcel->state(), State::kAway);
  EXPECT_EQ(tiers_.live_blocks(), 0);
  EXPECT_FALSE(parcel->TakeFetched());
  EXPECT_EQ(tiers_.Read(*parcel, reader_), Pattern(1, kBytes));
  EXPECT_EQ(CopiesIn(), 2u);
}

TEST_F(ParcelTest, WhatOneReaderHasStaysWhenTheParcelLetsGoOfIt) {
  const std::shared_ptr<Parcel> parcel = tiers_.SendAway(Pattern(1, kBytes), 2);
  tiers_.Fetch(*parcel->ClaimIfAway());
  const Parcel::Read read = parcel->ReadOrClaim(reader_);
  { EXPECT_TRUE(parcel->TakeFetched()); }
  EXPECT_EQ(tiers_.live_blocks(), 1);
  ASSERT_THAT(read.fetched.copy().WaitOn(tiers_.stream(), kReadAfterCopyIn), IsOk());
  EXPECT_EQ(tiers_.BytesIn(read.fetched.memory()), Pattern(1, kBytes));
}

TEST_F(ParcelTest, AParcelThatGoesLetsGoOfWhatWasFetchedAfterTheCopyIn) {
  {
    const std::shared_ptr<Parcel> parcel = tiers_.SendAway(Pattern(1, kBytes), 1);
    EXPECT_FALSE(tiers_.Fetch(*parcel->ClaimIfAway()).IsDone());
  }
  EXPECT_EQ(tiers_.live_blocks(), 0);
}

// -------------------------------------------------------------------------- forbidden transitions

using ParcelDeathTest = ParcelTest;

TEST_F(ParcelDeathTest, AParcelLeavesOnce) {
  const std::shared_ptr<Parcel> parcel = tiers_.PutOut(Pattern(1, kBytes));
  EXPECT_DEATH(parcel->Leave(parcel->copy_out(), {}), "a parcel leaves once");
  { const GuardedMemory evicted = parcel->Evict(); }
  EXPECT_DEATH(parcel->Leave(parcel->copy_out(), {}), "a parcel leaves once");
}

TEST_F(ParcelDeathTest, WhatTheDeviceHoldsIsNotFetched) {
  PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Parcel> parcel,
                              tiers_.tier().NewParcel(kBytes, tiers_.stream()));
  EXPECT_DEATH(parcel->ReadOrClaim(reader_), "as long as it holds them");
  const std::shared_ptr<Parcel> held = tiers_.PutOut(Pattern(1, kBytes));
  EXPECT_DEATH(held->ReadOrClaim(reader_), "as long as it holds them");
}

}  // namespace parcel_test
}  // namespace pinion::testing
