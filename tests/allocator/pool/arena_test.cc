#include "pinion/allocator/pool/arena.h"

#include <cstdint>
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/thread_slot.h"
#include "pinion/allocator/heap/block_records.h"
#include "pinion/allocator/heap/hardening.h"
#include "pinion/allocator/heap/segment_heap.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/tests/support/fake_timeline.h"

namespace pinion::internal {
namespace {

class ArenaTest : public ::testing::Test {
 protected:
  ArenaTest() : arena_(/*pool=*/nullptr, AllocatorOptions(), kNoThreadSlot) {
    std::vector<HostSegment> pieces;
    for (uint64_t i = 0; i < 8; ++i) {
      pieces.push_back({reinterpret_cast<void*>(kGiB + i * 2 * kMiB), 2 * kMiB, -1});
    }
    arena_.TakeOver(kBy, pieces, [](const void*) { return SegmentHeap::Border::kOpen; }, {});
  }
  BlockRecord* Take(uint64_t bytes) { return arena_.TryAllocate(kBy, {bytes, bytes}, &leftovers_); }
  // Gives up pieces to an arena that needs `least_bytes` and has `most_bytes` itself.
  std::vector<HostSegment> GiveUpHalf(uint64_t least_bytes, uint64_t most_bytes = kGiB) {
    return arena_.GiveUpShare(kBy, {least_bytes, most_bytes, /*piece_bytes=*/2 * kMiB},
                              &leftovers_);
  }

  static constexpr Arena::By kBy = Arena::By::kOther;
  Arena arena_;
  Arena::Leftovers leftovers_;
};

TEST_F(ArenaTest, HalfOfWhatIsFreeIsGivenUp) {
  EXPECT_EQ(GiveUpHalf(kMiB).size(), 4u);
  EXPECT_EQ(GiveUpHalf(kMiB).size(), 2u);
}

TEST_F(ArenaTest, AsMuchIsGivenUpAsIsAskedFor) { EXPECT_EQ(GiveUpHalf(10 * kMiB).size(), 5u); }

TEST_F(ArenaTest, WhatWasReleasedWithATicketThatIsDoneByNowIsFree) {
  const auto timeline = std::make_shared<::pinion::testing::FakeTimeline>();
  if (kHardened) GTEST_SKIP() << "hardened builds write to what waited, and no memory is there";
  BlockRecord* const all = Take(16 * kMiB);
  arena_.Enter(kBy, all, all->id, {timeline->Ticket(1)}, &leftovers_);
  EXPECT_TRUE(GiveUpHalf(kMiB).empty());
  timeline->CompleteVisibly(1);
  EXPECT_EQ(GiveUpHalf(kMiB).size(), 4u);
}

TEST_F(ArenaTest, NoMoreIsGivenUpThanTheOtherHasButForWhatItMisses) {
  EXPECT_EQ(GiveUpHalf(kMiB, /*most_bytes=*/2 * kMiB).size(), 1u);
  EXPECT_EQ(GiveUpHalf(3 * kMiB, /*most_bytes=*/2 * kMiB).size(), 2u);
  EXPECT_EQ(GiveUpHalf(kMiB, /*most_bytes=*/0).size(), 1u);
}

TEST_F(ArenaTest, NothingIsGivenUpWhereThatIsNotEnough) {
  EXPECT_TRUE(GiveUpHalf(17 * kMiB).empty());
  EXPECT_EQ(arena_.GiveUp(kBy, &leftovers_).size(), 8u);
}

TEST_F(ArenaTest, NothingIsGivenUpWhereNoHoleIsAsLongAsAPiece) {
  std::vector<BlockRecord*> blocks;
  for (int i = 0; i < 16; ++i) blocks.push_back(Take(kMiB));
  for (int i = 0; i < 16; i += 2) {
    if (kHardened) arena_.MarkReleased(kBy, blocks[i], blocks[i]->id);
    arena_.Enter(kBy, blocks[i], blocks[i]->id, {}, &leftovers_);
  }
  EXPECT_EQ(arena_.RoomForLargeBlocks(kBy, &leftovers_), 8 * kMiB);
  EXPECT_TRUE(GiveUpHalf(kMiB).empty());
  EXPECT_NE(Take(kMiB), nullptr);
}

TEST_F(ArenaTest, HolesShorterThanAPieceAreNotLookedThrough) {
  std::vector<BlockRecord*> blocks;
  for (int i = 0; i < 7; ++i) blocks.push_back(Take(2 * kMiB));
  // The free range is whole, but shorter than the requested piece size.
  const Arena::Share of_longer = {kMiB, kGiB, /*piece_bytes=*/4 * kMiB};
  EXPECT_TRUE(arena_.GiveUpShare(kBy, of_longer, &leftovers_).empty());
  EXPECT_EQ(GiveUpHalf(kMiB).size(), 1u);
}

}  // namespace
}  // namespace pinion::internal
