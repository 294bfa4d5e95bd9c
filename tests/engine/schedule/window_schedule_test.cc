// Parcels that an OffloadSchedule evicts, and when. window_prefetch_test.cc tests prefetching.

#include <cstdint>
#include <deque>
#include <initializer_list>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/engine/schedule/offload_schedule.h"

namespace pinion {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

WindowOptions WindowOf(uint64_t eviction_bytes) {
  return {.eviction_bytes = eviction_bytes, .prefetch_bytes = 100, .full_batch_bytes = 1000};
}

// Memory that parcels may share; only its address matters.
struct Memory {
  uint64_t size_bytes = 0;
};

class WindowScheduleTest : public ::testing::Test {
 protected:
  explicit WindowScheduleTest(const WindowOptions& options = WindowOf(100)) : schedule_(options) {}

  // Offloads the next parcel of scope 1. It holds `memory`, once for each time that it is listed.
  ScheduledParcel& Leave(std::initializer_list<const Memory*> memory) {
    ScheduledParcel& parcel = parcels_.emplace_back();
    parcel.place = {.scope = 1, .sequence = parcels_.size()};
    std::vector<HeldBytes> held;
    for (const Memory* piece : memory) held.push_back({piece, piece->size_bytes});
    schedule_.OnLeft(parcel, held);
    return parcel;
  }
  // Offloads a parcel that shares no memory.
  ScheduledParcel& Leave(uint64_t size_bytes) {
    return Leave({&memory_.emplace_back(Memory{size_bytes})});
  }
  void LeaveAll(const std::vector<uint64_t>& sizes_bytes) {
    for (const uint64_t size_bytes : sizes_bytes) Leave(size_bytes);
  }

  // Sequence numbers, from 1.
  static std::vector<uint64_t> Numbers(const ScheduledParcels& parcels) {
    std::vector<uint64_t> numbers;
    for (const ScheduledParcel* parcel : parcels) numbers.push_back(parcel->place.sequence);
    return numbers;
  }
  std::vector<uint64_t> Evict() { return Numbers(schedule_.TakeEvictions()); }
  std::vector<uint64_t> EvictAll() { return Numbers(schedule_.TakeAllEvictions()); }

  void Save(ScopeId scope, std::initializer_list<uint64_t> sizes) {
    for (const uint64_t size_bytes : sizes) {
      EXPECT_TRUE(schedule_.OnSaved(scope, {size_bytes}).leaves);
    }
  }

  OffloadSchedule schedule_;
  std::deque<Memory> memory_;
  std::deque<ScheduledParcel> parcels_;
};

class AutoWindowTest : public WindowScheduleTest {
 protected:
  AutoWindowTest() : WindowScheduleTest(WindowOf(WindowOptions::kAuto)) {}
};

TEST_F(WindowScheduleTest, TheOldestAreEvictedFirstAndOnlyDownToTheWindow) {
  LeaveAll({30, 40, 30, 45});
  EXPECT_THAT(Evict(), ElementsAre(1, 2)) << "145 bytes are held, and 115 without the first";
  EXPECT_THAT(Evict(), IsEmpty());
  Leave(25);
  EXPECT_THAT(Evict(), IsEmpty()) << "100 bytes are held";
  Leave(1);
  EXPECT_THAT(Evict(), ElementsAre(3));
}

TEST_F(WindowScheduleTest, AParcelThatIsLargerThanTheWindowGoesAtOnce) {
  LeaveAll({20, 101});
  EXPECT_THAT(Evict(), ElementsAre(1, 2));
}

TEST_F(WindowScheduleTest, AllThatHoldsMemoryCanBeAskedForAtOnceAndOnce) {
  LeaveAll({10, 20, 30});
  EXPECT_THAT(EvictAll(), ElementsAre(1, 2, 3));
  EXPECT_THAT(EvictAll(), IsEmpty());
  EXPECT_THAT(Evict(), IsEmpty());
}

TEST_F(WindowScheduleTest, WhatHoldsNoMemoryIsNeverEvicted) {
  Leave({});
  Leave(200);
  EXPECT_THAT(Evict(), ElementsAre(2));
  EXPECT_THAT(EvictAll(), IsEmpty());
}

TEST_F(WindowScheduleTest, AParcelThatIsGoneIsNotEvictedAndCountsNoMore) {
  Leave(60);
  ScheduledParcel& gone = Leave(60);
  EXPECT_FALSE(schedule_.OnGone(gone));
  EXPECT_THAT(Evict(), IsEmpty());
  EXPECT_THAT(EvictAll(), ElementsAre(1));
}

class TensorWindowTest : public WindowScheduleTest {
 protected:
  TensorWindowTest()
      : WindowScheduleTest(
            {.eviction_tensors = 2, .prefetch_bytes = 100, .full_batch_bytes = 1000}) {}
};

TEST_F(TensorWindowTest, AParcelIsEvictedOnceSoManyTensorsWereSavedAfterIt) {
  Leave(1000);
  Leave(1);
  schedule_.OnSaves(2);
  EXPECT_THAT(Evict(), IsEmpty()) << "however large they are";
  schedule_.OnSaves(3);
  EXPECT_THAT(Evict(), ElementsAre(1));
  EXPECT_THAT(Evict(), IsEmpty());
  schedule_.OnSaves(9);
  EXPECT_THAT(Evict(), ElementsAre(2));
}

TEST(WindowBatchTest, IsAQuarterOfAWindowAndUpTo32KiBHalfOfAnAutomaticOne) {
  OffloadSchedule automatic({.full_batch_bytes = kMiB});
  for (int i = 0; i < 100; ++i) automatic.OnSaved(/*scope=*/1, {.size_bytes = 4 * kKiB});
  automatic.OnScopeEnd(1);
  EXPECT_EQ(automatic.BatchBytes(), 32 * kKiB);
  for (int i = 0; i < 2000; ++i) automatic.OnSaved(/*scope=*/2, {.size_bytes = 4 * kKiB});
  automatic.OnScopeEnd(2);
  EXPECT_EQ(automatic.BatchBytes(), 125 * kKiB) << "a quarter of a sixteenth of 8000 KiB";

  const OffloadSchedule chosen({.eviction_bytes = 64 * kKiB, .full_batch_bytes = kMiB});
  EXPECT_EQ(chosen.BatchBytes(), 16 * kKiB);
}

TEST_F(TensorWindowTest, NothingWaitsForABatch) { EXPECT_EQ(schedule_.BatchBytes(), 0u); }

TEST_F(TensorWindowTest, AParcelThatIsSavedAgainStaysAsLongAsIfItWereNew) {
  ScheduledParcel& again = Leave(10);
  Leave(10);
  schedule_.OnSavedAgain(again, {.scope = 1, .sequence = 3});
  schedule_.OnSaves(4);
  EXPECT_THAT(Evict(), ElementsAre(2));
  schedule_.OnSaves(5);
  EXPECT_THAT(Evict(), ElementsAre(3)) << "its place by now";
}

// ------------------------------------------------------------------------------- shared memory

TEST_F(WindowScheduleTest, WhatSeveralHoldCountsOnceForTheOneThatLeftLast) {
  const Memory shared = {60};
  const ScheduledParcel& first = Leave({&shared});
  EXPECT_EQ(first.scheduled.held_bytes, 60u);
  const ScheduledParcel& last = Leave({&shared});
  EXPECT_EQ(first.scheduled.held_bytes, 0u);
  EXPECT_EQ(last.scheduled.held_bytes, 60u);
  EXPECT_THAT(Evict(), IsEmpty()) << "60 bytes are held, not 120";
}

// Evicting the first parcel frees nothing, so the window still holds too many bytes.
TEST_F(WindowScheduleTest, EvictionGoesOnUntilTheLastHolderHasLetGo) {
  const Memory shared = {60};
  Leave({&shared});
  Leave(30);
  Leave({&shared});
  Leave(20);
  EXPECT_THAT(Evict(), ElementsAre(1, 2)) << "110 bytes were held, and 80 without the second";
  Leave(21);
  EXPECT_THAT(Evict(), ElementsAre(3));
}

TEST_F(WindowScheduleTest, AHolderThatGoesHandsTheBytesToTheOneBeforeItThatIsLeft) {
  const Memory shared = {60};
  std::vector<ScheduledParcel*> holders;
  for (int i = 0; i < 4; ++i) holders.push_back(&Leave({&shared}));
  const auto held = [&holders] {
    std::vector<uint64_t> bytes;
    for (const ScheduledParcel* holder : holders) bytes.push_back(holder->scheduled.held_bytes);
    return bytes;
  };
  schedule_.OnGone(*holders[3]);
  EXPECT_THAT(held(), ElementsAre(0, 0, 60, 0));
  schedule_.OnGone(*holders[1]);
  EXPECT_THAT(held(), ElementsAre(0, 0, 60, 0)) << "one in the middle changes nothing";
  schedule_.OnGone(*holders[2]);
  EXPECT_THAT(held(), ElementsAre(60, 0, 0, 0)) << "not to the one that has gone";
  Leave(41);
  EXPECT_THAT(Evict(), ElementsAre(1)) << "101 bytes are held";
}

// A resized storage is the same storage. Each parcel holds it at the size at its offload.
TEST_F(WindowScheduleTest, MemoryThatHadAnotherSizeInAnotherParcelKeepsTheBooks) {
  Memory shared = {60};
  ScheduledParcel& small = Leave({&shared});
  shared.size_bytes = 90;
  ScheduledParcel& large = Leave({&shared});
  EXPECT_EQ(small.scheduled.held_bytes, 0u);
  EXPECT_EQ(large.scheduled.held_bytes, 90u);
  schedule_.OnPieceGone(large, &shared);
  schedule_.OnGone(large);
  EXPECT_EQ(small.scheduled.held_bytes, 60u);
  schedule_.OnGone(small);
  Leave(100);
  EXPECT_THAT(Evict(), IsEmpty()) << "the window holds 100 bytes";
  EXPECT_THAT(EvictAll(), ElementsAre(3));
  EXPECT_THAT(EvictAll(), IsEmpty());
}

TEST_F(WindowScheduleTest, OnlyThePiecesThatShareMemoryAreHandedOver) {
  const Memory shared = {30};
  const ScheduledParcel& first = Leave({&shared});
  const Memory own = {50};
  ScheduledParcel& second = Leave({&shared, &own});
  EXPECT_EQ(second.scheduled.held_bytes, 80u);
  schedule_.OnPieceGone(second, &shared);
  EXPECT_EQ(first.scheduled.held_bytes, 30u);
  EXPECT_EQ(second.scheduled.held_bytes, 50u);
}

TEST_F(WindowScheduleTest, MemoryIsHeldUntilTheLastPieceInItHasGone) {
  const Memory memory = {60};
  ScheduledParcel& parcel = Leave({&memory, &memory, &memory});
  EXPECT_EQ(parcel.scheduled.held_bytes, 60u);
  schedule_.OnPieceGone(parcel, &memory);
  schedule_.OnPieceGone(parcel, &memory);
  EXPECT_EQ(parcel.scheduled.held_bytes, 60u);
  schedule_.OnPieceGone(parcel, &memory);
  EXPECT_EQ(parcel.scheduled.held_bytes, 0u);
  Leave(100);
  EXPECT_THAT(Evict(), IsEmpty());
}

TEST_F(WindowScheduleTest, APieceThatGoesAfterTheEvictionChangesNothing) {
  const Memory shared = {101};
  ScheduledParcel& evicted = Leave({&shared});
  EXPECT_THAT(Evict(), ElementsAre(1));
  const ScheduledParcel& holder = Leave({&shared});
  schedule_.OnPieceGone(evicted, &shared);
  EXPECT_EQ(holder.scheduled.held_bytes, 101u);
  EXPECT_THAT(Evict(), ElementsAre(2));
}

// ----------------------------------------------------------------------------- automatic windows

// The window is twice 10 bytes, the fourth largest size.
TEST_F(AutoWindowTest, ATensorThatIsLargerThanAllOthersCountsHalfAWindow) {
  Save(1, {10, 10, 10, 10, 1000});
  const ScheduledParcel& outlier = Leave(1000);
  EXPECT_EQ(outlier.scheduled.held_bytes, 1000u);
  EXPECT_EQ(outlier.scheduled.window_bytes, 10u);
  Leave(10);
  EXPECT_THAT(Evict(), IsEmpty()) << "two fit";
  Leave(1);
  EXPECT_THAT(Evict(), ElementsAre(1));
}

TEST_F(WindowScheduleTest, InAWindowOfAGivenSizeALargeTensorCountsInFull) {
  Save(1, {10, 10, 10, 10, 1000});
  EXPECT_EQ(Leave(1000).scheduled.window_bytes, 1000u);
}

// The bytes removed from the sum must be those that were added at the offload.
TEST_F(AutoWindowTest, AWindowThatGrowsMeanwhileKeepsTheBooks) {
  Save(1, {10, 10, 10, 10});
  ScheduledParcel& outlier = Leave(1000);
  Save(1, {50, 50, 50, 50});
  EXPECT_EQ(outlier.scheduled.window_bytes, 10u);
  schedule_.OnGone(outlier);
  LeaveAll({50, 50});
  EXPECT_THAT(Evict(), IsEmpty()) << "the window is 100 bytes and holds as many";
  Leave(1);
  EXPECT_THAT(Evict(), ElementsAre(2));
}

TEST_F(AutoWindowTest, TheScopeThatEndedLastSizesTheWindowOfTheNext) {
  Save(1, {30, 30, 30, 30});
  schedule_.OnScopeEnd(1);
  Save(2, {1});
  LeaveAll({30, 30});
  EXPECT_THAT(Evict(), IsEmpty());
  schedule_.OnScopeEnd(2);
  EXPECT_THAT(Evict(), ElementsAre(1, 2)) << "a scope that saves 1 byte has a window of 2";
}

TEST_F(AutoWindowTest, OfScopesThatRunAtOnceTheLargestWindowCounts) {
  Save(1, {30, 30, 30, 30});
  Save(2, {5, 5, 5, 5});
  LeaveAll({30, 30});
  EXPECT_THAT(Evict(), IsEmpty());
}

TEST_F(AutoWindowTest, AScopeThatSavedNothingDoesNotShrinkTheWindow) {
  Save(1, {30, 30, 30, 30});
  LeaveAll({30, 30});
  schedule_.OnScopeEnd(1);
  schedule_.OnScopeEnd(2);
  EXPECT_THAT(Evict(), IsEmpty());
}

TEST(WindowBatchTest, FillsTheLinkOrAQuarterOfTheWindowAndHalfAWindowMayWaitToBeLetGoOf) {
  EXPECT_EQ(OffloadSchedule(WindowOf(100)).BatchBytes(), 25u);
  EXPECT_EQ(OffloadSchedule(WindowOf(1 << 20)).BatchBytes(), 1000u);
  EXPECT_EQ(OffloadSchedule(WindowOf(100)).LateBytes(), 50u);
}

}  // namespace
}  // namespace pinion
