#include <cstdint>
#include <memory>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/fence.h"
#include "pinion/allocator/heap/block_records.h"
#include "pinion/allocator/pool/pool_books.h"
#include "pinion/tests/support/fake_timeline.h"

namespace pinion::internal {
namespace {

using ::pinion::testing::FakeTimeline;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

class DeferredReleasesTest : public ::testing::Test {
 protected:
  void Add(BlockRecord* block, const std::shared_ptr<FakeTimeline>& timeline, uint64_t value) {
    ASSERT_TRUE(deferred_.MakeRoom(timeline, 1));
    deferred_.Add(block, timeline, value);
  }
  std::vector<BlockRecord*> TakeDone() {
    std::vector<BlockRecord*> done;
    deferred_.TakeDone([&done](BlockRecord* block) { done.push_back(block); }, &retired_);
    return done;
  }

  DeferredReleases::NextTickets NextTickets() const {
    DeferredReleases::NextTickets next;
    deferred_.AddNextTickets(&next);
    return next;
  }

  const std::shared_ptr<FakeTimeline> a_ = std::make_shared<FakeTimeline>();
  const std::shared_ptr<FakeTimeline> b_ = std::make_shared<FakeTimeline>();
  BlockRecord blocks_[3];
  DeferredReleases deferred_;
  DeferredReleases::Timelines retired_;
};

TEST_F(DeferredReleasesTest, ABlockIsDoneWhenItsTicketIs) {
  Add(&blocks_[0], a_, 5);
  a_->CompleteVisibly(4);
  EXPECT_THAT(TakeDone(), IsEmpty());
  a_->CompleteVisibly(5);
  EXPECT_THAT(TakeDone(), ElementsAre(&blocks_[0]));
  EXPECT_THAT(NextTickets(), IsEmpty());
}

TEST_F(DeferredReleasesTest, ABlockWithSeveralTicketsWaitsForAllOfThem) {
  Add(&blocks_[0], a_, 1);
  Add(&blocks_[0], b_, 1);
  Add(&blocks_[0], a_, 3);
  a_->CompleteVisibly(3);
  EXPECT_THAT(TakeDone(), IsEmpty());
  b_->CompleteVisibly(1);
  EXPECT_THAT(TakeDone(), ElementsAre(&blocks_[0]));
}

// A cache that stopped at the first event that was not ready kept 90 GB from being reused because
// of a single stuck event (pytorch#183501).
TEST_F(DeferredReleasesTest, AStuckTimelineHoldsBackOnlyItsOwnBlocks) {
  Add(&blocks_[0], a_, 1);  // stuck, and first
  Add(&blocks_[1], b_, 1);
  Add(&blocks_[2], b_, 2);
  b_->CompleteVisibly(2);
  EXPECT_THAT(TakeDone(), ElementsAre(&blocks_[1], &blocks_[2]));
  EXPECT_THAT(TakeDone(), IsEmpty());
}

// Backward releases blocks in the reverse order of forward.
TEST_F(DeferredReleasesTest, BlocksAreReclaimedByTicketNotByOrderOfRelease) {
  Add(&blocks_[0], a_, 9);
  Add(&blocks_[1], a_, 4);
  a_->CompleteVisibly(4);
  EXPECT_THAT(TakeDone(), ElementsAre(&blocks_[1]));
  EXPECT_THAT(TakeDone(), IsEmpty());
}

TEST_F(DeferredReleasesTest, NextTicketsAreTheEarliestOfEachTimeline) {
  Add(&blocks_[0], a_, 9);
  Add(&blocks_[1], a_, 4);
  Add(&blocks_[2], b_, 2);
  const DeferredReleases::NextTickets next = NextTickets();
  ASSERT_EQ(next.size(), 2u);
  EXPECT_EQ(next[0].timeline, a_);
  EXPECT_EQ(next[0].value, 4u);
  EXPECT_EQ(next[1].timeline, b_);
  EXPECT_EQ(next[1].value, 2u);
}

TEST_F(DeferredReleasesTest, ATimelineThatRoomWasMadeForInVainIsNotWaitedFor) {
  ASSERT_TRUE(deferred_.MakeRoom(a_, 2));
  Add(&blocks_[0], b_, 1);
  EXPECT_EQ(NextTickets().size(), 1u);
  EXPECT_THAT(TakeDone(), IsEmpty());
  EXPECT_EQ(a_.use_count(), 2) << "the test's, and what is handed over";
}

// Destroying a timeline may destroy a stream, which must not happen under the pool's lock.
TEST_F(DeferredReleasesTest, ReferencesToTimelinesAreHandedOverNotDropped) {
  auto timeline = std::make_shared<FakeTimeline>();
  const std::weak_ptr<FakeTimeline> watch = timeline;
  Add(&blocks_[0], timeline, 1);
  timeline->CompleteVisibly(1);
  timeline.reset();
  EXPECT_THAT(TakeDone(), ElementsAre(&blocks_[0]));
  EXPECT_FALSE(watch.expired());
  retired_.clear();
  EXPECT_TRUE(watch.expired());
}

}  // namespace
}  // namespace pinion::internal
