// Parcels that an OffloadSchedule prefetches, and when.

#include <cstdint>
#include <deque>
#include <set>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/engine/schedule/offload_schedule.h"

namespace pinion {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class WindowPrefetchTest : public ::testing::Test {
 protected:
  // A batch holds 25 bytes: a quarter of the eviction window.
  explicit WindowPrefetchTest(uint64_t prefetch_bytes = 100)
      : schedule_(
            {.eviction_bytes = 100, .prefetch_bytes = prefetch_bytes, .full_batch_bytes = 1000}) {}

  // Adds an offloaded parcel.
  ScheduledParcel& Send(ScopeId scope, uint64_t sequence, uint64_t size_bytes,
                        uint64_t stream = 0) {
    ScheduledParcel& parcel = parcels_.emplace_back();
    parcel.place = {scope, sequence};
    parcel.size_bytes = size_bytes;
    parcel.stream = stream;
    schedule_.OnLeft(parcel, {});
    return parcel;
  }
  // Adds parcels 1 to `count` of scope 1.
  void SendMany(uint64_t count, uint64_t size_bytes) {
    SendAll(std::vector<uint64_t>(count, size_bytes));
  }
  // Adds parcels of scope 1 with these sizes.
  void SendAll(const std::vector<uint64_t>& sizes_bytes) {
    for (uint64_t i = 0; i < sizes_bytes.size(); ++i) Send(1, i + 1, sizes_bytes[i]);
  }
  ScheduledParcel& Number(uint64_t sequence) { return parcels_[sequence - 1]; }

  // Requests a batch without fetching it.
  ScheduledParcels Ask(uint64_t sequence, int64_t backward) {
    OffloadSchedule::Fetches fetches = schedule_.TakeFetches(
        {1, sequence}, backward,
        [this](const ScheduledParcel& parcel) { return !on_device_.contains(&parcel); });
    looks_ = fetches.looks;
    is_all_ = fetches.is_all;
    return fetches.parcels;
  }
  // Fetches one batch and returns its sequence numbers.
  std::vector<uint64_t> Fetch(uint64_t sequence, int64_t backward = 1, bool room_was_made = false) {
    std::vector<uint64_t> numbers;
    for (ScheduledParcel* parcel : Ask(sequence, backward)) {
      on_device_.insert(parcel);
      schedule_.OnFetched(*parcel, backward);
      numbers.push_back(parcel->place.sequence);
    }
    if (!numbers.empty()) schedule_.OnFetchesMade(room_was_made);
    return numbers;
  }
  // Fetches batches until none is left.
  std::vector<uint64_t> FetchAll(uint64_t sequence, int64_t backward = 1) {
    std::vector<uint64_t> all;
    while (true) {
      const std::vector<uint64_t> batch = Fetch(sequence, backward);
      if (batch.empty()) return all;
      all.insert(all.end(), batch.begin(), batch.end());
    }
  }
  // Reads these parcels as their last reader, after which they are offloaded again.
  void Read(const std::vector<uint64_t>& sequences) {
    for (const uint64_t sequence : sequences) {
      schedule_.OnRead(Number(sequence));
      on_device_.erase(&Number(sequence));
    }
  }
  void Refuse(uint64_t sequence) {
    const ScheduledParcels refused = Ask(sequence, 1);
    ASSERT_FALSE(refused.empty());
    schedule_.OnFetchesRefused(refused);
  }

  OffloadSchedule schedule_;
  std::deque<ScheduledParcel> parcels_;
  std::set<const ScheduledParcel*> on_device_;
  uint64_t looks_ = 0;   // of the last batch
  bool is_all_ = false;  // the last batch left nothing to request
};

// -------------------------------------------------------------------------------- window, batch

TEST_F(WindowPrefetchTest, WhatIsSavedAgainIsFetchedForItsFirstRead) {
  SendMany(4, 10);
  schedule_.OnSavedAgain(Number(1), {1, 5});
  EXPECT_THAT(FetchAll(6), ElementsAre(5, 4, 3, 2)) << "the first one was saved last";
  schedule_.OnSavedAgain(Number(4), {1, 3});
  EXPECT_EQ(Number(4).place.sequence, 4u) << "something else in it was saved later";
}

TEST_F(WindowPrefetchTest, TheNewestComeFirstAsManyAsTheWindowHolds) {
  SendMany(20, 10);
  EXPECT_THAT(FetchAll(20), ElementsAre(19, 18, 17, 16, 15, 14, 13, 12, 11, 10));
}

// A reader releases the bytes before it reports the read.
TEST_F(WindowPrefetchTest, WhatIsAwayAgainBeforeItsReaderHasSaidSoIsNotCountedTwice) {
  SendAll({100, 40});
  EXPECT_THAT(Fetch(3, /*backward=*/1), ElementsAre(2));
  on_device_.erase(&Number(2));
  EXPECT_THAT(Fetch(3, /*backward=*/2), IsEmpty());
  EXPECT_TRUE(schedule_.OnRead(Number(2)));
  EXPECT_THAT(Fetch(2, /*backward=*/3), ElementsAre(1)) << "the window is as large as it was";
}

TEST_F(WindowPrefetchTest, ABatchHoldsNoMoreThanFillsTheLink) {
  SendMany(20, 10);
  EXPECT_THAT(Fetch(20), ElementsAre(19, 18));
  EXPECT_THAT(Fetch(20), ElementsAre(17, 16));
}

TEST_F(WindowPrefetchTest, WhatFillsTheLinkByItselfComesAlone) {
  SendAll({1, 60, 1});
  for (const uint64_t next : {3, 2, 1}) EXPECT_THAT(Fetch(4), ElementsAre(next));
}

TEST_F(WindowPrefetchTest, ABatchIsOfOneStream) {
  Send(1, 1, 1, /*stream=*/7);
  Send(1, 2, 1, /*stream=*/8);
  Send(1, 3, 1, /*stream=*/7);
  Send(1, 4, 1, /*stream=*/7);
  EXPECT_THAT(Fetch(5), ElementsAre(4, 3));
  EXPECT_THAT(Fetch(5), ElementsAre(2));
  EXPECT_THAT(Fetch(5), ElementsAre(1));
}

TEST_F(WindowPrefetchTest, WhatIsReadMakesRoomForTheNext) {
  SendMany(5, 50);
  EXPECT_THAT(FetchAll(5), ElementsAre(4, 3));
  EXPECT_THAT(FetchAll(5), IsEmpty());
  EXPECT_TRUE(schedule_.OnRead(Number(4)));
  EXPECT_FALSE(schedule_.OnRead(Number(4))) << "by a second reader";
  EXPECT_THAT(FetchAll(4), ElementsAre(2));
}

TEST_F(WindowPrefetchTest, WhatGoesUnreadMakesRoomAndIsToldAsWasted) {
  SendMany(6, 50);
  EXPECT_THAT(FetchAll(6), ElementsAre(5, 4));
  EXPECT_TRUE(schedule_.OnDropped(Number(5)));
  EXPECT_THAT(FetchAll(6), ElementsAre(3));
  EXPECT_TRUE(schedule_.OnGone(Number(4)));
  EXPECT_THAT(FetchAll(6), ElementsAre(2));
  EXPECT_FALSE(schedule_.OnDropped(Number(5)));
  EXPECT_FALSE(schedule_.OnGone(Number(5))) << "nothing of it was on the device any more";
}

TEST_F(WindowPrefetchTest, WhatIsLargerThanTheWindowComesWhenNothingElseIsAhead) {
  SendAll({500, 10});
  EXPECT_THAT(FetchAll(3), ElementsAre(2));
  Read({2});
  EXPECT_THAT(FetchAll(2), ElementsAre(1));
}

// The automatic window is twice 10 bytes. The large tensor counts half of it.
TEST(AutoPrefetchTest, ATensorThatIsLargerThanAllOthersCountsHalfAWindow) {
  OffloadSchedule schedule({.full_batch_bytes = 10000});
  for (const uint64_t size_bytes : {10, 10, 10, 10, 1000}) schedule.OnSaved(1, {size_bytes});
  std::deque<ScheduledParcel> parcels;
  for (const uint64_t size_bytes : {10, 10, 1000}) {
    ScheduledParcel& parcel = parcels.emplace_back();
    parcel.place = {1, parcels.size()};
    parcel.size_bytes = size_bytes;
    schedule.OnLeft(parcel, {});
  }
  uint64_t fetched = 0;
  for (int i = 0; i < 3; ++i) {
    fetched += schedule
                   .TakeFetches({1, 4}, 1,
                                [](const ScheduledParcel& parcel) {
                                  return !parcel.scheduled.fetched_ahead;
                                })
                   .parcels.size();
  }
  EXPECT_EQ(fetched, 2u);
  EXPECT_EQ(parcels[2].scheduled.ahead_bytes, 10u);
  EXPECT_TRUE(parcels[1].scheduled.fetched_ahead);
}

TEST_F(WindowPrefetchTest, ABatchThatIsFullAsksForAnotherAndAWindowThatIsFullDoesNot) {
  Send(1, 1, 60);
  Send(1, 2, 30, /*stream=*/1);
  Send(1, 3, 60);
  EXPECT_THAT(Fetch(4), ElementsAre(3)) << "the next one is of another stream";
  EXPECT_FALSE(is_all_);
  EXPECT_THAT(Fetch(4), ElementsAre(2)) << "the next one is of another stream, and has no room";
  EXPECT_TRUE(is_all_);
}

// ---------------------------------------------------------------------------------------- order

TEST_F(WindowPrefetchTest, AnotherScopeIsNotFetchedFor) {
  SendMany(2, 1);
  ScheduledParcel& other = Send(2, 1, 1);
  Send(2, 2, 1);
  EXPECT_THAT(FetchAll(3), ElementsAre(2, 1));
  EXPECT_FALSE(other.scheduled.fetched_ahead);
  const OffloadSchedule::Fetches fetches =
      schedule_.TakeFetches({2, 2}, 2, [](const ScheduledParcel&) { return true; });
  EXPECT_THAT(fetches.parcels, ElementsAre(&other)) << "and not on into scope 1";
}

// A nested scope's numbers lie between those of the outer one.
TEST_F(WindowPrefetchTest, WhatWasLookedAtInOneScopeIsNotPassedOverInAnother) {
  for (const uint64_t sequence : {1, 4}) Send(2, sequence, 1);
  for (const uint64_t sequence : {2, 3}) Send(1, sequence, 1);
  schedule_.TakeFetches({2, 5}, /*backward=*/1, [](const ScheduledParcel&) { return true; });
  EXPECT_THAT(FetchAll(4, /*backward=*/1), ElementsAre(3, 2));
}

TEST_F(WindowPrefetchTest, WhatWasSavedLaterIsNotFetched) {
  SendMany(5, 1);
  EXPECT_THAT(FetchAll(3), ElementsAre(2, 1));
}

TEST_F(WindowPrefetchTest, WhatIsOnTheDeviceIsPassedOver) {
  SendMany(5, 1);
  on_device_ = {&Number(4), &Number(2)};
  EXPECT_THAT(FetchAll(5), ElementsAre(3, 1));
}

// A node reads its tensors in its own order, and their handles live until it is done.
TEST_F(WindowPrefetchTest, WhatThisBackwardHadIsPassedOverAndAnotherBackwardsIsNot) {
  SendMany(4, 1);
  schedule_.OnFetched(Number(3), 1);
  schedule_.OnFetched(Number(2), 2);
  EXPECT_THAT(FetchAll(4, 1), ElementsAre(2, 1));
}

TEST_F(WindowPrefetchTest, OutsideOfABackwardNothingCountsAsHad) {
  SendMany(3, 1);
  schedule_.OnFetched(Number(2), -1);
  EXPECT_THAT(FetchAll(3, -1), ElementsAre(2, 1));
}

TEST_F(WindowPrefetchTest, NothingIsAskedForOrLookedAtTwiceInOneBackward) {
  SendMany(10, 10);
  EXPECT_THAT(FetchAll(11), ElementsAre(10, 9, 8, 7, 6, 5, 4, 3, 2, 1));
  for (uint64_t sequence = 10; sequence >= 1; --sequence) {
    Read({sequence});
    EXPECT_THAT(Fetch(sequence), IsEmpty());
    EXPECT_EQ(looks_, 0u);
  }
}

// Outside of a backward, nothing else records that a parcel was fetched.
TEST_F(WindowPrefetchTest, WhatWasAskedForIsNotAskedForAgainOnceItWasRead) {
  SendMany(4, 20);
  EXPECT_THAT(Fetch(5, -1), ElementsAre(4));
  Read({4});
  EXPECT_THAT(Fetch(5, -1), ElementsAre(3));
}

TEST_F(WindowPrefetchTest, EachBackwardHasItsOwnPlace) {
  SendMany(6, 50);
  EXPECT_THAT(FetchAll(6, 1), ElementsAre(5, 4));
  Read({5, 4});
  EXPECT_THAT(FetchAll(6, 2), ElementsAre(5, 4));
  Read({5});
  EXPECT_THAT(FetchAll(5, 1), ElementsAre(3));
}

TEST_F(WindowPrefetchTest, ABackwardThatHasEndedBeginsAnew) {
  SendMany(4, 50);
  EXPECT_THAT(FetchAll(4, -1), ElementsAre(3, 2));
  Read({3, 2});
  schedule_.OnBackwardEnd(-1);
  EXPECT_THAT(FetchAll(4, -1), ElementsAre(3, 2));
}

// All layers read an attention mask: parcel 2 here.
TEST_F(WindowPrefetchTest, WhatWasSavedEarlyAndIsReadInBetweenDoesNotLoseThePlace) {
  SendMany(12, 20);
  EXPECT_THAT(FetchAll(12), ElementsAre(11, 10, 9, 8, 7));
  Read({11, 10});
  EXPECT_THAT(FetchAll(2), ElementsAre(1)) << "what comes before the mask";
  EXPECT_THAT(FetchAll(10), ElementsAre(6)) << "the next, which were not looked at before";
  Read({9});
  EXPECT_THAT(FetchAll(9), ElementsAre(5));
}

// Parcels below 30 were examined before, and are skipped in one step.
TEST_F(WindowPrefetchTest, WhatHasBeenLookedAtBelowIsPassedOverInOneLook) {
  SendMany(40, 1);
  EXPECT_THAT(FetchAll(30), ::testing::SizeIs(29));
  on_device_.clear();
  EXPECT_THAT(Fetch(35), ElementsAre(34, 33, 32, 31, 30));
  EXPECT_EQ(looks_, 6u);
  EXPECT_THAT(Fetch(34), IsEmpty());
}

TEST_F(WindowPrefetchTest, WhatHasBeenLookedAtBelowIsPassedOverEvenIfItIsAwayByNow) {
  SendMany(40, 1);
  for (const ScheduledParcel& parcel : parcels_) on_device_.insert(&parcel);
  EXPECT_THAT(FetchAll(30), IsEmpty());
  on_device_.clear();
  EXPECT_THAT(FetchAll(35), ElementsAre(34, 33, 32, 31, 30));
}

TEST_F(WindowPrefetchTest, WhatWasTheOnlyOneToBeLookedAtBelowIsPassedOverToo) {
  SendMany(3, 1);
  on_device_.insert(&Number(1));
  EXPECT_THAT(FetchAll(2), IsEmpty());
  on_device_.clear();
  EXPECT_THAT(FetchAll(3), ElementsAre(2));
}

// --------------------------------------------------------------------------------- refusal, room

TEST_F(WindowPrefetchTest, AfterARefusalPausesDoubleAndTheSameIsAskedForAgain) {
  SendMany(3, 60);
  for (const int pause : {0, 1, 2, 4, 8}) {
    for (int i = 0; i < pause; ++i) EXPECT_THAT(Ask(3, 1), IsEmpty()) << pause;
    Refuse(3);
    EXPECT_FALSE(Number(2).scheduled.fetched_ahead);
  }
}

TEST_F(WindowPrefetchTest, AFetchThatWorkedMakesTheNextPauseShortAgain) {
  SendMany(3, 60);
  Refuse(3);
  EXPECT_THAT(Ask(3, 1), IsEmpty());
  Refuse(3);
  for (int i = 0; i < 2; ++i) EXPECT_THAT(Ask(3, 1), IsEmpty());
  EXPECT_THAT(Fetch(3), ElementsAre(2));
  Read({2});
  Refuse(2);
  EXPECT_THAT(Fetch(2), IsEmpty());
  EXPECT_THAT(Fetch(2), ElementsAre(1));
}

// LibTorch's allocator returns its cache before it fails, and the host waits for that.
TEST_F(WindowPrefetchTest, AFetchForWhichRoomWasMadeIsFollowedByAPauseLikeARefusedOne) {
  SendMany(4, 60);
  uint64_t next = 4;
  for (const int pause : {0, 1, 2}) {
    for (int i = 0; i < pause; ++i) EXPECT_THAT(Fetch(next), IsEmpty()) << pause;
    EXPECT_THAT(Fetch(next, /*backward=*/1, /*room_was_made=*/true), ElementsAre(next - 1));
    Read({--next});
  }
}

TEST_F(WindowPrefetchTest, ANewBackwardTriesAtOnce) {
  SendMany(3, 60);
  for (const int pause : {0, 1, 2, 4}) {
    for (int i = 0; i < pause; ++i) Ask(3, 1);
    Refuse(3);
  }
  EXPECT_THAT(Fetch(3), IsEmpty());
  schedule_.OnBackwardBegin(2);
  EXPECT_THAT(Fetch(3, 2), ElementsAre(2));
}

TEST_F(WindowPrefetchTest, WhatWasDroppedToMakeRoomIsAskedForAgain) {
  SendMany(5, 50);
  EXPECT_THAT(FetchAll(5), ElementsAre(4, 3));
  const std::vector<ScheduledParcel*> ahead = schedule_.FetchedAhead();
  EXPECT_THAT(ahead, ElementsAre(&Number(3), &Number(4)));
  schedule_.OnRoomWanted();
  for (ScheduledParcel* parcel : ahead) {
    EXPECT_TRUE(schedule_.OnDropped(*parcel));
    on_device_.erase(parcel);
  }
  EXPECT_THAT(schedule_.FetchedAhead(), IsEmpty());
  EXPECT_THAT(FetchAll(5), ElementsAre(4, 3));
}

TEST_F(WindowPrefetchTest, WhatABackwardFetchedCanBeAskedFor) {
  SendMany(4, 1);
  schedule_.OnFetched(Number(1), 1);
  schedule_.OnFetched(Number(2), 2);
  schedule_.OnFetched(Number(3), 1);
  EXPECT_THAT(schedule_.FetchedIn(1), ElementsAre(&Number(1), &Number(3)));
  schedule_.OnGone(Number(1));
  EXPECT_THAT(schedule_.FetchedIn(1), ElementsAre(&Number(3)));
}

}  // namespace
}  // namespace pinion
