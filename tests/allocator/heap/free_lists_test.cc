#include "pinion/allocator/heap/free_lists.h"

#include <algorithm>
#include <cstdint>
#include <deque>
#include <iterator>
#include <random>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/heap/block_records.h"
#include "pinion/allocator/heap/size_class.h"

namespace pinion::internal {
namespace {

using ::testing::SizeIs;
using ::testing::UnorderedElementsAreArray;

class FreeListsTest : public ::testing::Test {
 protected:
  BlockRecord* NewBlock(uint64_t capacity_bytes) {
    records_.emplace_back();
    records_.back().capacity_bytes = capacity_bytes;
    return &records_.back();
  }

  std::deque<BlockRecord> records_;
  FreeLists lists_;
};

TEST_F(FreeListsTest, EmptyListsHaveNothing) {
  for (int level = 0; level < kLevels; ++level) {
    EXPECT_EQ(lists_.Find(kMinBlockBytes << level), nullptr);
  }
}

TEST_F(FreeListsTest, WhatIsTooSmallIsNotFound) {
  lists_.Insert(NewBlock(kMiB));
  EXPECT_EQ(lists_.Find(RoundUpToSizeClass(kMiB + 1)), nullptr);
}

// Each bucket and level alone: one that stays marked after its last block is searched in vain.
TEST_F(FreeListsTest, TheLastBlockOfABucketLeavesNothingBehind) {
  for (uint64_t size_bytes = kMinBlockBytes; size_bytes <= kGiB;
       size_bytes = RoundUpToSizeClass(size_bytes + 1)) {
    BlockRecord* const block = NewBlock(size_bytes);
    lists_.Insert(block);
    EXPECT_EQ(lists_.Find(size_bytes), block);
    EXPECT_EQ(lists_.Find(kMinBlockBytes), block);
    lists_.Remove(block);
    ASSERT_EQ(lists_.Find(size_bytes), nullptr) << size_bytes;
    ASSERT_EQ(lists_.Find(kMinBlockBytes), nullptr) << size_bytes;
  }
}

// Above 256 MiB a bucket holds several sizes, so a search must compare them.
TEST_F(FreeListsTest, SixteenBlocksOfABucketAreLookedAt) {
  BlockRecord* const large = NewBlock(518 * kMiB);
  lists_.Insert(large);
  for (int i = 0; i < 15; ++i) lists_.Insert(NewBlock(516 * kMiB));
  EXPECT_EQ(lists_.Find(518 * kMiB), large);
  lists_.Insert(NewBlock(516 * kMiB));
  EXPECT_EQ(lists_.Find(518 * kMiB), nullptr);
}

TEST_F(FreeListsTest, AnyBlockOfAListCanBeRemoved) {
  for (int removed = 0; removed < 3; ++removed) {
    FreeLists lists;
    std::vector<BlockRecord*> blocks;
    for (int i = 0; i < 3; ++i) {
      blocks.push_back(NewBlock(kMiB));
      lists.Insert(blocks.back());
    }
    lists.Remove(blocks[removed]);
    for (int left = 2; left > 0; --left) {
      BlockRecord* const found = lists.Find(kMiB);
      ASSERT_NE(found, nullptr);
      EXPECT_NE(found, blocks[removed]);
      lists.Remove(found);
    }
    EXPECT_EQ(lists.Find(kMiB), nullptr);
  }
}

// Resize moves the block to another bucket; it must leave nothing in the previous one.
TEST_F(FreeListsTest, ABlockThatGrewOrShrankIsFoundByItsNewSize) {
  BlockRecord* const block = NewBlock(kMiB);
  lists_.Insert(block);
  BlockRecord* const other = NewBlock(8 * kMiB);
  lists_.Insert(other);
  for (const uint64_t size_bytes : {4 * kMiB, kMiB / 2, 16 * kMiB}) {
    lists_.Resize(block, size_bytes);
    EXPECT_EQ(lists_.Find(size_bytes), block);
    EXPECT_EQ(lists_.Find(8 * kMiB), other);
    EXPECT_EQ(lists_.Find(32 * kMiB), nullptr);
  }
  lists_.Resize(other, 2 * kMiB);  // returns the first block to a bucket
  EXPECT_EQ(lists_.Find(2 * kMiB), other);
  EXPECT_EQ(lists_.Find(16 * kMiB), block);
  lists_.Remove(other);
  EXPECT_EQ(lists_.Find(kMinBlockBytes), block);
  lists_.Remove(block);
  EXPECT_EQ(lists_.Find(kMinBlockBytes), nullptr);
}

// A cache that popped from a bucket of mixed sizes without a comparison returned a 150 MB block for
// a 200 MB request (pytorch#192722). Random sizes lie between the size classes, or are classes: up
// to 256 MiB each class has a bucket of its own, so the tightest block is found.
TEST_F(FreeListsTest, WhatIsFoundFitsWhateverGrowsAndShrinks) {
  for (const bool of_classes : {false, true}) {
    SCOPED_TRACE(of_classes);
    std::mt19937_64 random(192722);
    const auto random_size = [&] {
      const uint64_t least = kMinBlockBytes << (random() % 23);
      const uint64_t size_bytes = least + random() % least;
      return of_classes ? RoundUpToSizeClass(size_bytes) : size_bytes;
    };
    FreeLists lists;
    std::vector<BlockRecord*> free;
    for (int step = 0; step < 20'000; ++step) {
      const uint64_t size_bytes = random_size();
      const uint64_t choice = random() % 4;
      if (choice == 0 || free.empty()) {
        free.push_back(NewBlock(size_bytes));
        lists.Insert(free.back());
      } else if (choice == 1) {
        lists.Resize(free[random() % free.size()], size_bytes);
      } else if (choice == 2) {
        std::swap(free[random() % free.size()], free.back());
        lists.Remove(free.back());
        free.pop_back();
      }
      const auto at_least = [&free](uint64_t bytes) {
        std::vector<BlockRecord*> blocks;
        std::copy_if(free.begin(), free.end(), std::back_inserter(blocks),
                     [&](const BlockRecord* block) { return block->capacity_bytes >= bytes; });
        return blocks;
      };
      if (step % 100 == 0) {
        ASSERT_THAT(lists.AtLeast(size_bytes), UnorderedElementsAreArray(at_least(size_bytes)));
        ASSERT_THAT(lists.AtLeast(kMinBlockBytes), SizeIs(free.size()));
      }
      const uint64_t request = RoundUpToSizeClass(random_size());
      const BlockRecord* const found = lists.Find(request);
      uint64_t tightest_bytes = UINT64_MAX;
      for (const BlockRecord* block : at_least(request)) {
        tightest_bytes = std::min(tightest_bytes, block->capacity_bytes);
      }
      if (request <= 256 * kMiB) {
        ASSERT_EQ(found != nullptr, tightest_bytes != UINT64_MAX);
      }
      if (found == nullptr) continue;
      ASSERT_GE(found->capacity_bytes, request);
      ASSERT_LE(BucketOf(found->capacity_bytes), BucketOf(tightest_bytes));
      if (of_classes && tightest_bytes <= 256 * kMiB) {
        ASSERT_EQ(found->capacity_bytes, tightest_bytes);
      }
    }
  }
}

}  // namespace
}  // namespace pinion::internal
