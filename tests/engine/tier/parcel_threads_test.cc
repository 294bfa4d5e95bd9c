// Several threads use one parcel. Races are forced: one thread sleeps before another continues.

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/tier/guarded_memory.h"
#include "pinion/engine/tier/parcel.h"
#include "pinion/tests/engine/engine_world.h"
#include "pinion/tests/engine/tier/sleeping_thread.h"
#include "pinion/tests/engine/tier/tier_world.h"
#include "pinion/tests/support/run_threads.h"

namespace pinion::testing {
namespace parcel_threads_test {

using ::testing::IsEmpty;
using State = Parcel::State;

constexpr uint64_t kBytes = 64 * kKiB;

class ParcelThreadsTest : public ::testing::Test {
 protected:
  ~ParcelThreadsTest() override {
    EXPECT_THAT(world_.machine().races(), IsEmpty());
    EXPECT_EQ(tiers_.live_blocks(), 0);
  }
  uint64_t CopiesIn() { return world_.engine().GetStats().h2d.submitted_transfers; }

  EngineWorld world_;
  TierWorld tiers_{world_};
  Parcel::Reader a_, b_;
};

TEST_F(ParcelThreadsTest, WhoeverWaitsForAFetchGetsWhatItBrings) {
  const std::shared_ptr<Parcel> parcel = tiers_.SendAway(Pattern(1, kBytes), 2);
  Parcel::Read mine = parcel->ReadOrClaim(a_);
  ASSERT_TRUE(mine.claim.has_value());
  std::vector<uint8_t> read;
  SleepingThread other([&] { read = tiers_.Read(*parcel, b_); });
  other.AwaitSleep();
  EXPECT_FALSE(other.done());
  tiers_.Fetch(*std::move(mine.claim));
  other.Join();
  EXPECT_EQ(read, Pattern(1, kBytes));
  EXPECT_EQ(tiers_.Read(*parcel, a_), Pattern(1, kBytes));
  EXPECT_EQ(CopiesIn(), 1u);
}

TEST_F(ParcelThreadsTest, WhoeverWaitsForAFetchThatFailsFetchesByItself) {
  const std::shared_ptr<Parcel> parcel = tiers_.SendAway(Pattern(1, kBytes), 1);
  std::optional<FetchClaim> claim = parcel->ClaimIfAway();
  std::vector<uint8_t> read;
  SleepingThread other([&] { read = tiers_.Read(*parcel, a_); });
  other.AwaitSleep();
  EXPECT_FALSE(other.done());
  EXPECT_EQ(CopiesIn(), 0u);
  claim.reset();
  other.Join();
  EXPECT_EQ(read, Pattern(1, kBytes));
  EXPECT_EQ(CopiesIn(), 1u);
}

TEST_F(ParcelThreadsTest, OfManyWhoWaitForAFetchThatFailsOneFetchesForAll) {
  const std::shared_ptr<Parcel> parcel = tiers_.SendAway(Pattern(1, kBytes), 4);
  std::optional<FetchClaim> claim = parcel->ClaimIfAway();
  std::vector<Parcel::Reader> readers(4);
  std::vector<std::unique_ptr<SleepingThread>> threads;
  for (Parcel::Reader& reader : readers) {
    threads.push_back(std::make_unique<SleepingThread>(
        [&] { EXPECT_EQ(tiers_.Read(*parcel, reader), Pattern(1, kBytes)); }));
  }
  for (const auto& thread : threads) thread->AwaitSleep();
  EXPECT_EQ(CopiesIn(), 0u);
  claim.reset();
  for (const auto& thread : threads) thread->Join();
  EXPECT_EQ(CopiesIn(), 1u);
  EXPECT_EQ(parcel->state(), State::kAway) << "the last of them has let go of it";
}

TEST_F(ParcelThreadsTest, AFetchOfAnotherParcelIsNotWaitedFor) {
  const std::shared_ptr<Parcel> parcel = tiers_.SendAway(Pattern(1, kBytes));
  const std::shared_ptr<Parcel> other = tiers_.SendAway(Pattern(2, kBytes), 1);
  const std::optional<FetchClaim> claim = parcel->ClaimIfAway();
  EXPECT_EQ(tiers_.Read(*other, a_), Pattern(2, kBytes));
}

TEST_F(ParcelThreadsTest, ManyThreadsThatReadAndGoSeeTheBytesAndLeaveNothingBehind) {
  constexpr int kThreads = 8;
  const std::shared_ptr<Parcel> parcel = tiers_.SendAway(Pattern(1, kBytes), kThreads);
  RunThreads(kThreads, [&](int thread) {
    Parcel::Reader reader;
    for (int round = 0; round < 10; ++round) {
      if ((thread + round) % 4 == 0) {
        // A prefetch that other threads may wait for. Every second one is given up.
        std::optional<FetchClaim> claim = parcel->ClaimIfAway();
        if (claim.has_value() && round % 2 == 0) tiers_.Fetch(*std::move(claim));
      }
      EXPECT_EQ(tiers_.Read(*parcel, reader), Pattern(1, kBytes));
      if ((thread + round) % 5 == 0) {
        const GuardedMemory dropped = parcel->TakeFetched();
      }
    }
    const GuardedMemory released = parcel->RemoveReader(reader);
  });
  tiers_.Fetch(*parcel->ClaimIfAway());
  EXPECT_EQ(parcel->state(), Parcel::State::kAway) << "nobody is left to read it";
  EXPECT_GT(CopiesIn(), 0u);
}

}  // namespace parcel_threads_test
}  // namespace pinion::testing
