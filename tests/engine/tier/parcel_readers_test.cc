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

namespace pinion {
namespace parcel_readers_test {

using testing::EngineWorld;
using ::testing::IsEmpty;
using testing::IsOk;
using testing::kReadAfterCopyIn;
using testing::Pattern;
using ::testing::SizeIs;
using testing::TierWorld;
using State = Parcel::State;

constexpr uint64_t kBytes = 64 * kKiB;

class ParcelReadersTest : public ::testing::Test {
 protected:
  ~ParcelReadersTest() override { EXPECT_THAT(world_.machine().races(), IsEmpty()); }

  // Returns an offloaded parcel with this number of readers.
  std::shared_ptr<Parcel> NewParcel(int readers) {
    std::shared_ptr<Parcel> parcel = tiers_.SendAway(Pattern(1, kBytes));
    parcel->AddReaders(readers);
    return parcel;
  }
  std::shared_ptr<Parcel> NewFetched(int readers) {
    std::shared_ptr<Parcel> parcel = NewParcel(readers);
    tiers_.Fetch(*parcel->ClaimIfAway());
    return parcel;
  }
  // Reads and checks the bytes.
  void Read(Parcel& parcel, Parcel::Reader& reader) {
    EXPECT_EQ(tiers_.Read(parcel, reader), Pattern(1, kBytes));
  }
  // Reads, and keeps the fetched bytes for the next epoch.
  void ReadAndKeep(Parcel& parcel, Parcel::Reader& reader) {
    std::optional<Parcel::Read> read;
    ASSERT_TRUE(parcel.ReadIfFetched(reader, read, Parcel::Afterwards::kKeep));
    EXPECT_EQ(parcel.state(), State::kFetched);
  }
  bool OnDevice(const Parcel& parcel) {
    const bool fetched = parcel.state() == State::kFetched;
    EXPECT_EQ(tiers_.live_blocks(), fetched ? 1 : 0);
    return fetched;
  }
  uint64_t CopiesIn() { return world_.engine().GetStats().h2d.submitted_transfers; }

  EngineWorld world_;
  TierWorld tiers_{world_};
  Parcel::Reader a_, b_, c_;
};

TEST_F(ParcelReadersTest, ReadersThatComeLaterCountAsWell) {
  const std::shared_ptr<Parcel> parcel = NewFetched(1);
  parcel->AddReaders(1);
  Read(*parcel, a_);
  EXPECT_TRUE(OnDevice(*parcel));
  Read(*parcel, b_);
  EXPECT_FALSE(OnDevice(*parcel));
}

TEST_F(ParcelReadersTest, TheLastReaderMayKeepWhatWasFetchedForAllOfThem) {
  const std::shared_ptr<Parcel> parcel = NewFetched(2);
  ReadAndKeep(*parcel, a_);
  ReadAndKeep(*parcel, b_);
  EXPECT_TRUE(OnDevice(*parcel));
  Read(*parcel, b_);
  EXPECT_TRUE(OnDevice(*parcel)) << "in this epoch one of two has read it";
  Read(*parcel, a_);
  EXPECT_FALSE(OnDevice(*parcel));
  EXPECT_EQ(CopiesIn(), 1u);
}

TEST_F(ParcelReadersTest, WhatIsKeptGoesWithTheLastReader) {
  const std::shared_ptr<Parcel> parcel = NewFetched(2);
  ReadAndKeep(*parcel, a_);
  ReadAndKeep(*parcel, b_);
  EXPECT_FALSE(parcel->RemoveReader(a_));
  EXPECT_TRUE(OnDevice(*parcel));
  EXPECT_TRUE(parcel->RemoveReader(b_));
  EXPECT_FALSE(OnDevice(*parcel));
}

TEST_F(ParcelReadersTest, WhatIsKeptCanBeTakenAndFetchedAgain) {
  const std::shared_ptr<Parcel> parcel = NewFetched(1);
  ReadAndKeep(*parcel, a_);
  EXPECT_TRUE(parcel->TakeFetched());
  EXPECT_FALSE(OnDevice(*parcel));
  Read(*parcel, a_);
  EXPECT_EQ(CopiesIn(), 2u);
}

TEST_F(ParcelReadersTest, TheLastReaderLetsGoOfWhatWasFetched) {
  const std::shared_ptr<Parcel> parcel = NewFetched(3);
  Read(*parcel, a_);
  Read(*parcel, c_);
  EXPECT_TRUE(OnDevice(*parcel));
  Read(*parcel, b_);
  EXPECT_FALSE(OnDevice(*parcel));
  EXPECT_EQ(CopiesIn(), 1u) << "one fetch served all of them";
}

TEST_F(ParcelReadersTest, TheLastReaderGetsTheParcelsReference) {
  const std::shared_ptr<Parcel> parcel = NewFetched(1);
  Parcel::Read read = parcel->ReadOrClaim(a_);
  EXPECT_TRUE(read.fetched);
  EXPECT_FALSE(read.fetched.memory().IsShared());
  EXPECT_EQ(parcel->state(), State::kAway);
  ASSERT_THAT(read.fetched.copy().WaitOn(tiers_.stream(), kReadAfterCopyIn), IsOk());
  EXPECT_EQ(tiers_.BytesIn(read.fetched.memory()), Pattern(1, kBytes));
}

TEST_F(ParcelReadersTest, AReaderThatReadsTwiceCountsOnce) {
  const std::shared_ptr<Parcel> parcel = NewFetched(2);
  Read(*parcel, a_);
  Read(*parcel, a_);
  EXPECT_TRUE(OnDevice(*parcel)) << "the other one has not read it";
  Read(*parcel, b_);
  EXPECT_FALSE(OnDevice(*parcel));
}

TEST_F(ParcelReadersTest, EachFetchIsForAllReadersAnew) {
  const std::shared_ptr<Parcel> parcel = NewFetched(2);
  for (uint64_t epoch = 1; epoch <= 3; ++epoch) {
    Read(*parcel, a_);
    EXPECT_TRUE(OnDevice(*parcel));
    Read(*parcel, b_);
    EXPECT_FALSE(OnDevice(*parcel));
    EXPECT_EQ(CopiesIn(), epoch);
  }
}

TEST_F(ParcelReadersTest, WhatIsTakenBackBeforeAllHaveReadItIsForAllAnewToo) {
  const std::shared_ptr<Parcel> parcel = NewFetched(2);
  Read(*parcel, a_);
  { EXPECT_TRUE(parcel->TakeFetched()); }
  Read(*parcel, b_);
  EXPECT_TRUE(OnDevice(*parcel)) << "the first one may read it again";
  Read(*parcel, a_);
  EXPECT_FALSE(OnDevice(*parcel));
}

TEST_F(ParcelReadersTest, AReaderThatFoundTheBytesElsewhereHasRead) {
  const std::shared_ptr<Parcel> parcel = NewFetched(2);
  Read(*parcel, a_);
  { EXPECT_TRUE(parcel->MarkRead(b_)); }
  EXPECT_FALSE(OnDevice(*parcel));
}

TEST_F(ParcelReadersTest, AReaderThatFoundTheBytesElsewhereBeforeTheFetchHasReadToo) {
  const std::shared_ptr<Parcel> parcel = NewParcel(2);
  EXPECT_FALSE(parcel->MarkRead(b_));
  EXPECT_FALSE(parcel->MarkRead(b_));
  EXPECT_FALSE(parcel->TakeFetched()) << "nothing is there, and nothing is forgotten";
  Read(*parcel, a_);
  EXPECT_FALSE(OnDevice(*parcel));
}

TEST_F(ParcelReadersTest, WhereAllFoundTheBytesElsewhereTheNextFetchIsForAllAnew) {
  const std::shared_ptr<Parcel> parcel = NewParcel(2);
  EXPECT_FALSE(parcel->MarkRead(a_));
  EXPECT_FALSE(parcel->MarkRead(b_));
  Read(*parcel, a_);
  EXPECT_TRUE(OnDevice(*parcel));
  Read(*parcel, b_);
  EXPECT_FALSE(OnDevice(*parcel));
}

// ------------------------------------------------------------------------------- removed readers

TEST_F(ParcelReadersTest, AReaderThatGoesUnreadIsNotWaitedForAnyMore) {
  const std::shared_ptr<Parcel> parcel = NewFetched(3);
  Read(*parcel, a_);
  EXPECT_FALSE(parcel->RemoveReader(c_));
  EXPECT_TRUE(OnDevice(*parcel));
  { EXPECT_TRUE(parcel->RemoveReader(b_)); }
  EXPECT_FALSE(OnDevice(*parcel));
}

TEST_F(ParcelReadersTest, AReaderThatGoesAfterItHasReadLeavesTheOthersToRead) {
  const std::shared_ptr<Parcel> parcel = NewFetched(3);
  Read(*parcel, a_);
  EXPECT_FALSE(parcel->RemoveReader(a_));
  Read(*parcel, b_);
  EXPECT_TRUE(OnDevice(*parcel)) << "one that has not read is left";
  Read(*parcel, c_);
  EXPECT_FALSE(OnDevice(*parcel));
}

TEST_F(ParcelReadersTest, AReaderThatGoesAnEpochLaterHasNotReadInThisOne) {
  const std::shared_ptr<Parcel> parcel = NewFetched(2);
  Read(*parcel, a_);
  Read(*parcel, b_);
  Read(*parcel, a_);
  EXPECT_TRUE(OnDevice(*parcel));
  { EXPECT_TRUE(parcel->RemoveReader(b_)) << "who read the one before only"; }
  EXPECT_FALSE(OnDevice(*parcel));
}

TEST_F(ParcelReadersTest, WithTheLastReaderGoesWhatWasFetched) {
  const std::shared_ptr<Parcel> parcel = NewFetched(1);
  { EXPECT_TRUE(parcel->RemoveReader(a_)); }
  EXPECT_FALSE(OnDevice(*parcel));
}

TEST_F(ParcelReadersTest, AReaderThatComesLateIsWaitedForToo) {
  const std::shared_ptr<Parcel> parcel = NewFetched(1);
  parcel->AddReaders(1);
  Read(*parcel, a_);
  EXPECT_TRUE(OnDevice(*parcel));
  Read(*parcel, b_);
  EXPECT_FALSE(OnDevice(*parcel));
}

// -------------------------------------------------------------------------------- during a fetch

TEST_F(ParcelReadersTest, AFetchThatNobodyIsLeftToReadIsGivenBack) {
  const std::shared_ptr<Parcel> parcel = NewParcel(0);
  std::vector<Arrival> arrivals;
  arrivals.push_back({*parcel->ClaimIfAway(), tiers_.NewMemory(kBytes)});
  GuardedMemories unneeded;
  ASSERT_THAT(tiers_.tier().Fetch(absl::MakeSpan(arrivals), tiers_.stream(), unneeded), IsOk());
  EXPECT_THAT(unneeded, SizeIs(1));
  EXPECT_EQ(parcel->state(), State::kAway);
  EXPECT_EQ(tiers_.live_blocks(), 1);
  unneeded.clear();
  EXPECT_EQ(tiers_.live_blocks(), 0);
}

TEST_F(ParcelReadersTest, TheLastReaderThatGoesWhileSomebodyFetchesLeavesNothingOnTheDevice) {
  const std::shared_ptr<Parcel> parcel = NewParcel(1);
  std::optional<FetchClaim> claim = parcel->ClaimIfAway();
  EXPECT_FALSE(parcel->RemoveReader(a_));
  EXPECT_EQ(parcel->state(), State::kFetching);
  tiers_.Fetch(*std::move(claim));
  EXPECT_FALSE(OnDevice(*parcel));
  parcel->AddReaders(1);
  Read(*parcel, b_);
  EXPECT_FALSE(OnDevice(*parcel));
}

TEST_F(ParcelReadersTest, AReaderThatGoesWhileSomebodyFetchesLeavesTheOthersToRead) {
  const std::shared_ptr<Parcel> parcel = NewParcel(2);
  std::optional<FetchClaim> claim = parcel->ClaimIfAway();
  EXPECT_FALSE(parcel->RemoveReader(a_));
  tiers_.Fetch(*std::move(claim));
  EXPECT_TRUE(OnDevice(*parcel));
  Read(*parcel, b_);
  EXPECT_FALSE(OnDevice(*parcel));
}

TEST_F(ParcelReadersTest, AReaderThatFindsTheBytesElsewhereWhileSomebodyFetchesHasRead) {
  const std::shared_ptr<Parcel> parcel = NewParcel(2);
  std::optional<FetchClaim> claim = parcel->ClaimIfAway();
  EXPECT_FALSE(parcel->MarkRead(a_));
  tiers_.Fetch(*std::move(claim));
  EXPECT_TRUE(OnDevice(*parcel));
  Read(*parcel, b_);
  EXPECT_FALSE(OnDevice(*parcel));
}

// The bytes that arrive later are for all readers again. Otherwise no reader would free them.
TEST_F(ParcelReadersTest, WhereAllFindTheBytesElsewhereWhileSomebodyFetchesTheyReadAnew) {
  const std::shared_ptr<Parcel> parcel = NewParcel(2);
  std::optional<FetchClaim> claim = parcel->ClaimIfAway();
  EXPECT_FALSE(parcel->MarkRead(a_));
  EXPECT_FALSE(parcel->MarkRead(b_));
  tiers_.Fetch(*std::move(claim));
  Read(*parcel, a_);
  EXPECT_TRUE(OnDevice(*parcel));
  Read(*parcel, b_);
  EXPECT_FALSE(OnDevice(*parcel));
}

TEST_F(ParcelReadersTest, WhereTheLastUnreadReaderGoesWhileSomebodyFetchesTheOthersReadAnew) {
  const std::shared_ptr<Parcel> parcel = NewParcel(2);
  EXPECT_FALSE(parcel->MarkRead(a_));
  std::optional<FetchClaim> claim = parcel->ClaimIfAway();
  EXPECT_FALSE(parcel->RemoveReader(b_));
  tiers_.Fetch(*std::move(claim));
  Read(*parcel, a_);
  EXPECT_FALSE(OnDevice(*parcel));
}

TEST_F(ParcelReadersTest, AFetchThatFailsChangesNothingForTheReaders) {
  const std::shared_ptr<Parcel> parcel = NewParcel(2);
  EXPECT_FALSE(parcel->MarkRead(a_));
  { const std::optional<FetchClaim> given_up = parcel->ClaimIfAway(); }
  Read(*parcel, b_);
  EXPECT_FALSE(OnDevice(*parcel));
  EXPECT_EQ(CopiesIn(), 1u);
}

}  // namespace parcel_readers_test
}  // namespace pinion
