// Readers of a parcel, and when the fetched bytes are freed.

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/tier/device_tier.h"
#include "pinion/engine/tier/guarded_memory.h"
#include "pinion/engine/tier/parcel.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/tests/engine/engine_world.h"
#include "pinion/tests/engine/tier/tier_world.h"
#include "pinion/tests/support/status_matchers.h"
#include "pinion/tests/support/test_waits.h"

namespace pinion::testing {
namespace parcel_readers_test {

using ::testing::IsEmpty;
using ::testing::SizeIs;
using State = Parcel::State;

constexpr uint64_t kBytes = 64 * kKiB;

class ParcelReadersTest : public ::testing::Test {
 protected:
  ~ParcelReadersTest() override {
    parcel_ = nullptr;
    EXPECT_THAT(world_.machine().races(), IsEmpty());
  }

  // Offloads parcel_ with this number of readers.
  void NewParcel(int readers) { parcel_ = tiers_.SendAway(Pattern(1, kBytes), readers); }
  void NewFetched(int readers) {
    NewParcel(readers);
    tiers_.Fetch(*parcel_->ClaimIfAway());
  }
  // Reads and checks the bytes. Returns whether they stay on the device.
  bool StaysAfterRead(Parcel::Reader& reader) {
    EXPECT_EQ(tiers_.Read(*parcel_, reader), Pattern(1, kBytes));
    return OnDevice();
  }
  // Reads, and keeps the fetched bytes for the next epoch.
  void ReadAndKeep(Parcel::Reader& reader) {
    std::optional<Parcel::Read> read;
    ASSERT_TRUE(parcel_->ReadIfFetched(reader, read, Parcel::Afterwards::kKeep));
    EXPECT_EQ(parcel_->state(), State::kFetched);
  }
  bool OnDevice() {
    const bool fetched = parcel_->state() == State::kFetched;
    EXPECT_EQ(tiers_.live_blocks(), fetched ? 1 : 0);
    return fetched;
  }
  uint64_t CopiesIn() { return world_.engine().GetStats().h2d.submitted_transfers; }

  EngineWorld world_;
  TierWorld tiers_{world_};
  std::shared_ptr<Parcel> parcel_;
  Parcel::Reader a_, b_, c_;
};

TEST_F(ParcelReadersTest, ReadersThatComeLaterCountAsWell) {
  NewFetched(1);
  parcel_->AddReaders(1);
  EXPECT_TRUE(StaysAfterRead(a_));
  EXPECT_FALSE(StaysAfterRead(b_));
}

TEST_F(ParcelReadersTest, TheLastReaderMayKeepWhatWasFetchedForAllOfThem) {
  NewFetched(2);
  ReadAndKeep(a_);
  ReadAndKeep(b_);
  EXPECT_TRUE(OnDevice());
  EXPECT_TRUE(StaysAfterRead(b_)) << "in this epoch one of two has read it";
  EXPECT_FALSE(StaysAfterRead(a_));
  EXPECT_EQ(CopiesIn(), 1u);
}

TEST_F(ParcelReadersTest, AnOnlyReaderMayKeepWhatWasFetchedAtEachRead) {
  NewFetched(1);
  for (int read = 0; read < 2; ++read) {
    EXPECT_TRUE(parcel_->ReadOrClaim(a_, Parcel::Afterwards::kKeep).fetched);
    EXPECT_TRUE(OnDevice());
  }
  EXPECT_FALSE(StaysAfterRead(a_));
  EXPECT_EQ(CopiesIn(), 1u);
}

TEST_F(ParcelReadersTest, WhatIsKeptGoesWithTheLastReader) {
  NewFetched(2);
  ReadAndKeep(a_);
  ReadAndKeep(b_);
  EXPECT_FALSE(parcel_->RemoveReader(a_));
  EXPECT_TRUE(OnDevice());
  EXPECT_TRUE(parcel_->RemoveReader(b_));
  EXPECT_FALSE(OnDevice());
}

TEST_F(ParcelReadersTest, WhatIsKeptCanBeTakenAndFetchedAgain) {
  NewFetched(1);
  ReadAndKeep(a_);
  EXPECT_TRUE(parcel_->TakeFetched());
  EXPECT_FALSE(OnDevice());
  EXPECT_FALSE(StaysAfterRead(a_));
  EXPECT_EQ(CopiesIn(), 2u);
}

TEST_F(ParcelReadersTest, TheLastReaderLetsGoOfWhatWasFetched) {
  NewFetched(3);
  EXPECT_TRUE(StaysAfterRead(a_));
  EXPECT_TRUE(StaysAfterRead(c_));
  EXPECT_FALSE(StaysAfterRead(b_));
  EXPECT_EQ(CopiesIn(), 1u) << "one fetch served all of them";
}

TEST_F(ParcelReadersTest, TheLastReaderGetsTheParcelsReference) {
  NewFetched(1);
  Parcel::Read read = parcel_->ReadOrClaim(a_);
  EXPECT_TRUE(read.fetched);
  EXPECT_FALSE(read.fetched.memory().IsShared());
  EXPECT_EQ(parcel_->state(), State::kAway);
  ASSERT_THAT(read.fetched.copy().WaitOn(tiers_.stream(), kReadAfterCopyIn), IsOk());
  EXPECT_EQ(tiers_.BytesIn(read.fetched.memory()), Pattern(1, kBytes));
}

TEST_F(ParcelReadersTest, AReaderThatReadsTwiceCountsOnce) {
  NewFetched(2);
  EXPECT_TRUE(StaysAfterRead(a_));
  EXPECT_TRUE(StaysAfterRead(a_)) << "the other one has not read it";
  EXPECT_FALSE(StaysAfterRead(b_));
}

TEST_F(ParcelReadersTest, EachFetchIsForAllReadersAnew) {
  NewFetched(2);
  for (uint64_t epoch = 1; epoch <= 3; ++epoch) {
    EXPECT_TRUE(StaysAfterRead(a_));
    EXPECT_FALSE(StaysAfterRead(b_));
    EXPECT_EQ(CopiesIn(), epoch);
  }
}

TEST_F(ParcelReadersTest, WhatIsTakenBackBeforeAllHaveReadItIsForAllAnewToo) {
  NewFetched(2);
  EXPECT_TRUE(StaysAfterRead(a_));
  { EXPECT_TRUE(parcel_->TakeFetched()); }
  EXPECT_TRUE(StaysAfterRead(b_)) << "the first one may read it again";
  EXPECT_FALSE(StaysAfterRead(a_));
}

TEST_F(ParcelReadersTest, AReaderThatFoundTheBytesElsewhereHasRead) {
  NewFetched(2);
  EXPECT_TRUE(StaysAfterRead(a_));
  { EXPECT_TRUE(parcel_->MarkRead(b_)); }
  EXPECT_FALSE(OnDevice());
}

TEST_F(ParcelReadersTest, AReaderThatFoundTheBytesElsewhereBeforeTheFetchHasReadToo) {
  NewParcel(2);
  EXPECT_FALSE(parcel_->MarkRead(b_));
  EXPECT_FALSE(parcel_->MarkRead(b_));
  EXPECT_FALSE(parcel_->TakeFetched()) << "nothing is there, and nothing is forgotten";
  EXPECT_FALSE(StaysAfterRead(a_));
}

TEST_F(ParcelReadersTest, WhereAllFoundTheBytesElsewhereTheNextFetchIsForAllAnew) {
  NewParcel(2);
  EXPECT_FALSE(parcel_->MarkRead(a_));
  EXPECT_FALSE(parcel_->MarkRead(b_));
  EXPECT_TRUE(StaysAfterRead(a_));
  EXPECT_FALSE(StaysAfterRead(b_));
}

// ------------------------------------------------------------------------------- removed readers

TEST_F(ParcelReadersTest, AReaderThatGoesUnreadIsNotWaitedForAnyMore) {
  NewFetched(3);
  EXPECT_TRUE(StaysAfterRead(a_));
  EXPECT_FALSE(parcel_->RemoveReader(c_));
  EXPECT_TRUE(OnDevice());
  { EXPECT_TRUE(parcel_->RemoveReader(b_)); }
  EXPECT_FALSE(OnDevice());
}

TEST_F(ParcelReadersTest, AReaderThatGoesAfterItHasReadLeavesTheOthersToRead) {
  NewFetched(3);
  EXPECT_TRUE(StaysAfterRead(a_));
  EXPECT_FALSE(parcel_->RemoveReader(a_));
  EXPECT_TRUE(StaysAfterRead(b_)) << "one that has not read is left";
  EXPECT_FALSE(StaysAfterRead(c_));
}

TEST_F(ParcelReadersTest, AReaderThatGoesAnEpochLaterHasNotReadInThisOne) {
  NewFetched(2);
  EXPECT_TRUE(StaysAfterRead(a_));
  EXPECT_FALSE(StaysAfterRead(b_));
  EXPECT_TRUE(StaysAfterRead(a_));
  { EXPECT_TRUE(parcel_->RemoveReader(b_)) << "who read the one before only"; }
  EXPECT_FALSE(OnDevice());
}

TEST_F(ParcelReadersTest, WithTheLastReaderGoesWhatWasFetched) {
  NewFetched(1);
  EXPECT_TRUE(parcel_->RemoveReader(a_));
  EXPECT_FALSE(OnDevice());
}

// -------------------------------------------------------------------------------- during a fetch

TEST_F(ParcelReadersTest, AFetchThatNobodyIsLeftToReadIsGivenBack) {
  NewParcel(0);
  std::vector<Arrival> arrivals;
  arrivals.push_back({*parcel_->ClaimIfAway(), tiers_.NewMemory(kBytes)});
  GuardedMemories unneeded;
  ASSERT_THAT(tiers_.tier().Fetch(absl::MakeSpan(arrivals), tiers_.stream(), unneeded), IsOk());
  EXPECT_THAT(unneeded, SizeIs(1));
  EXPECT_EQ(parcel_->state(), State::kAway);
  EXPECT_EQ(tiers_.live_blocks(), 1);
  unneeded.clear();
  EXPECT_EQ(tiers_.live_blocks(), 0);
}

TEST_F(ParcelReadersTest, TheLastReaderThatGoesWhileSomebodyFetchesLeavesNothingOnTheDevice) {
  NewParcel(1);
  std::optional<FetchClaim> claim = parcel_->ClaimIfAway();
  EXPECT_FALSE(parcel_->RemoveReader(a_));
  EXPECT_EQ(parcel_->state(), State::kFetching);
  tiers_.Fetch(*std::move(claim));
  EXPECT_FALSE(OnDevice());
  parcel_->AddReaders(1);
  EXPECT_FALSE(StaysAfterRead(b_));
}

TEST_F(ParcelReadersTest, AReaderThatGoesWhileSomebodyFetchesLeavesTheOthersToRead) {
  NewParcel(2);
  std::optional<FetchClaim> claim = parcel_->ClaimIfAway();
  EXPECT_FALSE(parcel_->RemoveReader(a_));
  tiers_.Fetch(*std::move(claim));
  EXPECT_TRUE(OnDevice());
  EXPECT_FALSE(StaysAfterRead(b_));
}

TEST_F(ParcelReadersTest, AReaderThatFindsTheBytesElsewhereWhileSomebodyFetchesHasRead) {
  NewParcel(2);
  std::optional<FetchClaim> claim = parcel_->ClaimIfAway();
  EXPECT_FALSE(parcel_->MarkRead(a_));
  tiers_.Fetch(*std::move(claim));
  EXPECT_TRUE(OnDevice());
  EXPECT_FALSE(StaysAfterRead(b_));
}

// The bytes that arrive later are for all readers again. Otherwise no reader would free them.
TEST_F(ParcelReadersTest, WhereAllFindTheBytesElsewhereWhileSomebodyFetchesTheyReadAnew) {
  NewParcel(2);
  std::optional<FetchClaim> claim = parcel_->ClaimIfAway();
  EXPECT_FALSE(parcel_->MarkRead(a_));
  EXPECT_FALSE(parcel_->MarkRead(b_));
  tiers_.Fetch(*std::move(claim));
  EXPECT_TRUE(StaysAfterRead(a_));
  EXPECT_FALSE(StaysAfterRead(b_));
}

TEST_F(ParcelReadersTest, WhereTheLastUnreadReaderGoesWhileSomebodyFetchesTheOthersReadAnew) {
  NewParcel(2);
  EXPECT_FALSE(parcel_->MarkRead(a_));
  std::optional<FetchClaim> claim = parcel_->ClaimIfAway();
  EXPECT_FALSE(parcel_->RemoveReader(b_));
  tiers_.Fetch(*std::move(claim));
  EXPECT_FALSE(StaysAfterRead(a_));
}

TEST_F(ParcelReadersTest, AFetchThatFailsChangesNothingForTheReaders) {
  NewParcel(2);
  EXPECT_FALSE(parcel_->MarkRead(a_));
  { const std::optional<FetchClaim> given_up = parcel_->ClaimIfAway(); }
  EXPECT_FALSE(StaysAfterRead(b_));
  EXPECT_EQ(CopiesIn(), 1u);
}

}  // namespace parcel_readers_test
}  // namespace pinion::testing
