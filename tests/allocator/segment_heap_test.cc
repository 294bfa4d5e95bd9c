#include "pinion/allocator/segment_heap.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/allocator/allocator_stats.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/allocator/segment.h"
#include "pinion/allocator/size_class.h"

namespace pinion::internal {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kSlab = 64 * kKiB;

// The heap never touches memory, so addresses may be made up.
HostSegment FakeSegment(uint64_t address, uint64_t size_bytes) {
  return {.data = reinterpret_cast<void*>(address), .size_bytes = size_bytes};
}

uint64_t Address(const BlockRecord* block) { return reinterpret_cast<uint64_t>(block->data); }

TEST(SegmentHeapTest, AnEmptyHeapHasNoBlock) {
  SegmentHeap heap(kPage, kSlab);
  EXPECT_EQ(heap.Take(kMiB), nullptr);
}

TEST(SegmentHeapTest, BlocksAreCutToTheirSize) {
  SegmentHeap heap(kPage, kSlab);
  heap.AddSegment(FakeSegment(kGiB, 4 * kMiB));
  const BlockRecord* first = heap.Take(kMiB);
  const BlockRecord* second = heap.Take(3 * kMiB);
  ASSERT_NE(first, nullptr);
  ASSERT_NE(second, nullptr);
  EXPECT_EQ(Address(first), kGiB);
  EXPECT_EQ(Address(second), kGiB + kMiB);
  EXPECT_EQ(heap.Take(kSmallLimitBytes), nullptr);
  EXPECT_EQ(heap.large_free_bytes(), 0u);
}

TEST(SegmentHeapTest, NeighboursJoinInWhateverOrderTheyComeBack) {
  std::vector<int> order = {0, 1, 2, 3};
  do {
    SegmentHeap heap(kPage, kSlab);
    heap.AddSegment(FakeSegment(kGiB, 4 * kMiB));
    std::vector<BlockRecord*> blocks;
    for (int i = 0; i < 4; ++i) blocks.push_back(heap.Take(kMiB));
    for (const int i : order) heap.Put(blocks[i]);
    BlockRecord* whole = heap.Take(4 * kMiB);
    ASSERT_NE(whole, nullptr);
    EXPECT_EQ(Address(whole), kGiB);
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(SegmentHeapTest, BlocksOfDifferentSegmentsDoNotJoinEvenIfTheyTouch) {
  SegmentHeap heap(kPage, kSlab);
  heap.AddSegment(FakeSegment(kGiB, kMiB));
  heap.AddSegment(FakeSegment(kGiB + kMiB, kMiB));
  EXPECT_EQ(heap.Take(2 * kMiB), nullptr);
}

TEST(SegmentHeapTest, TheTightestHoleIsTaken) {
  SegmentHeap heap(kPage, kSlab);
  heap.AddSegment(FakeSegment(1 * kGiB, 8 * kMiB));
  heap.AddSegment(FakeSegment(2 * kGiB, 3 * kMiB));
  heap.AddSegment(FakeSegment(3 * kGiB, 5 * kMiB));
  EXPECT_EQ(Address(heap.Take(3 * kMiB)), 2 * kGiB);
  EXPECT_EQ(Address(heap.Take(4 * kMiB)), 3 * kGiB);
}

TEST(SegmentHeapTest, ALargeHoleThatFitsExactlyIsFoundBehindSmallerOnesOfItsBucket) {
  SegmentHeap heap(kPage, kSlab);
  const uint64_t size_bytes = 518 * kMiB;  // within the bucket from 512 to 520 MiB
  heap.AddSegment(FakeSegment(1 * kGiB, size_bytes));
  heap.AddSegment(FakeSegment(2 * kGiB, size_bytes - 2 * kMiB));
  BlockRecord* block = heap.Take(size_bytes);
  ASSERT_NE(block, nullptr);
  EXPECT_EQ(Address(block), kGiB);
}

TEST(SegmentHeapTest, SmallBlocksShareASlab) {
  SegmentHeap heap(kPage, kSlab);
  EXPECT_EQ(heap.Take(kMinBlockBytes), nullptr);
  heap.AddSegment(FakeSegment(kGiB, kMiB));
  const BlockRecord* first = heap.Take(kMinBlockBytes);
  const BlockRecord* second = heap.Take(kMinBlockBytes);
  EXPECT_EQ(Address(first), kGiB);
  EXPECT_EQ(Address(second), kGiB + kMinBlockBytes);
  EXPECT_EQ(heap.large_free_bytes(), kMiB - kSlab);
  EXPECT_EQ(Address(heap.Take(kSmallLimitBytes)), kGiB + kSlab);
}

TEST(SegmentHeapTest, ASlabThatDoesNotFitIsAsSmallAsItsBlock) {
  SegmentHeap heap(kPage, kSlab);
  heap.AddSegment(FakeSegment(kGiB, kPage));
  EXPECT_EQ(Address(heap.Take(kMinBlockBytes)), kGiB);
  EXPECT_EQ(Address(heap.Take(kMinBlockBytes)), kGiB + kMinBlockBytes);
  EXPECT_EQ(heap.large_free_bytes(), 0u);
}

TEST(SegmentHeapTest, SlabsKeepTheAlignmentOfLargeBlocks) {
  constexpr uint64_t kAlignment = 2 * kMiB;
  SegmentHeap heap(kAlignment, kSlab);
  heap.AddSegment(FakeSegment(kGiB, 8 * kMiB));
  ASSERT_NE(heap.Take(kMinBlockBytes), nullptr);
  EXPECT_EQ(Address(heap.Take(kAlignment)) % kAlignment, 0u);
}

TEST(SegmentHeapTest, AFreeSlabMakesRoomForALargeBlock) {
  SegmentHeap heap(kPage, kSlab);
  heap.AddSegment(FakeSegment(kGiB, kMiB));
  BlockRecord* small = heap.Take(kMinBlockBytes);
  EXPECT_EQ(heap.Take(kMiB), nullptr);
  heap.Put(small);
  EXPECT_EQ(heap.large_free_bytes(), kMiB - kSlab);  // kept for the next small block
  EXPECT_NE(heap.Take(kMiB), nullptr);
}

TEST(SegmentHeapTest, OnlyWhollyFreeSegmentsAreRemoved) {
  SegmentHeap heap(kPage, kSlab);
  heap.AddSegment(FakeSegment(1 * kGiB, kMiB));
  BlockRecord* used = heap.Take(512 * kKiB);
  heap.AddSegment(FakeSegment(2 * kGiB, kMiB));
  const std::vector<HostSegment> removed = heap.RemoveFreeSegments({});
  ASSERT_EQ(removed.size(), 1u);
  EXPECT_EQ(removed[0].data, reinterpret_cast<void*>(2 * kGiB));
  heap.Put(used);
  EXPECT_EQ(heap.RemoveFreeSegments({}).size(), 1u);
  EXPECT_EQ(heap.segment_bytes(), 0u);
  EXPECT_EQ(heap.large_free_bytes(), 0u);
}

TEST(SegmentHeapTest, ASegmentWhoseSlabsAreFreeIsRemoved) {
  SegmentHeap heap(kPage, kSlab);
  heap.AddSegment(FakeSegment(kGiB, kMiB));
  BlockRecord* small = heap.Take(kMinBlockBytes);
  EXPECT_TRUE(heap.RemoveFreeSegments({}).empty());
  heap.Put(small);
  EXPECT_EQ(heap.RemoveFreeSegments({}).size(), 1u);
}

TEST(SegmentHeapTest, NothingIsRemovedWhereThatWouldNotBeEnough) {
  SegmentHeap heap(kPage, kSlab);
  heap.AddSegment(FakeSegment(kGiB, kMiB));
  EXPECT_TRUE(heap.RemoveFreeSegments({.bytes = kMiB + 1, .all_or_none = true}).empty());
  EXPECT_EQ(heap.RemoveFreeSegments({.bytes = kMiB, .all_or_none = true}).size(), 1u);
}

TEST(SegmentHeapTest, OnlyLongSegmentsAreRemovedWhereThatIsAskedFor) {
  SegmentHeap heap(kPage, kSlab);
  heap.AddSegment(FakeSegment(1 * kGiB, kMiB));
  heap.AddSegment(FakeSegment(2 * kGiB, 2 * kMiB));
  const std::vector<HostSegment> removed = heap.RemoveFreeSegments({.longer_than_bytes = kMiB});
  ASSERT_EQ(removed.size(), 1u);
  EXPECT_EQ(removed[0].size_bytes, 2 * kMiB);
}

TEST(SegmentHeapTest, NodesAddUpTheirSegments) {
  SegmentHeap heap(kPage, kSlab);
  EXPECT_TRUE(heap.NumaNodes().empty());
  HostSegment memory = FakeSegment(1 * kGiB, kMiB);
  memory.numa_node = 1;
  heap.AddSegment(memory);
  heap.AddSegment(FakeSegment(2 * kGiB, 2 * kMiB));
  heap.AddSegment(FakeSegment(3 * kGiB, 3 * kMiB));
  BlockRecord* block = heap.Take(2 * kMiB);
  BlockRecord* small = heap.Take(kMinBlockBytes);
  const std::vector<NumaNodeStats> nodes = heap.NumaNodes();
  ASSERT_EQ(nodes.size(), 2u);
  EXPECT_EQ(nodes[0].numa_node, -1);
  EXPECT_EQ(nodes[0].segments, 2u);
  EXPECT_EQ(nodes[0].locked_bytes, 5 * kMiB);
  EXPECT_EQ(nodes[0].used_bytes, 2 * kMiB);
  EXPECT_EQ(nodes[1].numa_node, 1);
  EXPECT_EQ(nodes[1].used_bytes, kMinBlockBytes);
  heap.Put(block);
  heap.Put(small);
  EXPECT_EQ(heap.NumaNodes()[0].used_bytes, 0u);
  EXPECT_EQ(heap.NumaNodes()[1].used_bytes, 0u);
}

TEST(SegmentHeapTest, NoMoreSegmentsAreRemovedThanAskedFor) {
  SegmentHeap heap(kPage, kSlab);
  for (uint64_t i = 1; i <= 4; ++i) heap.AddSegment(FakeSegment(i * kGiB, kMiB));
  EXPECT_TRUE(heap.RemoveFreeSegments({.bytes = 0}).empty());
  EXPECT_EQ(heap.RemoveFreeSegments({.bytes = kMiB + 1}).size(), 2u);
  EXPECT_EQ(heap.segment_bytes(), 2 * kMiB);
}

// The reference: which addresses of which segment are in use, and nothing else.
class ReferenceHeap {
 public:
  void AddSegment(uint64_t address, uint64_t size_bytes) { segments_[address] = {size_bytes, {}}; }

  // Fails the test if the block overlaps another or leaves its segment.
  void Take(uint64_t address, uint64_t size_bytes) {
    auto segment = std::prev(segments_.upper_bound(address));
    ASSERT_LE(address + size_bytes, segment->first + segment->second.size_bytes);
    auto& used = segment->second.used;
    const auto next = used.lower_bound(address);
    if (next != used.end()) {
      ASSERT_LE(address + size_bytes, next->first);
    }
    if (next != used.begin()) {
      ASSERT_LE(std::prev(next)->first + std::prev(next)->second, address);
    }
    used[address] = size_bytes;
  }
  void Put(uint64_t address) {
    std::prev(segments_.upper_bound(address))->second.used.erase(address);
  }

  uint64_t LargestHole() const {
    uint64_t largest = 0;
    for (const auto& [start, segment] : segments_) {
      uint64_t end = start;
      for (const auto& [address, size_bytes] : segment.used) {
        largest = std::max(largest, address - end);
        end = address + size_bytes;
      }
      largest = std::max(largest, start + segment.size_bytes - end);
    }
    return largest;
  }

 private:
  struct Segment {
    uint64_t size_bytes;
    std::map<uint64_t, uint64_t> used;
  };
  std::map<uint64_t, Segment> segments_;
};

TEST(SegmentHeapTest, RandomOperationsAgreeWithAReference) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    SegmentHeap heap(kPage, kSlab);
    ReferenceHeap reference;
    for (uint64_t i = 1; i <= 3; ++i) {
      heap.AddSegment(FakeSegment(i * kGiB, i * 16 * kMiB));
      reference.AddSegment(i * kGiB, i * 16 * kMiB);
    }
    std::vector<BlockRecord*> live;
    for (int step = 0; step < 2000; ++step) {
      if (random() % 100 < 55 || live.empty()) {
        const uint64_t wish = kSmallLimitBytes << (random() % 9);
        const uint64_t size_bytes = RoundUpToSizeClass(wish + random() % wish);
        BlockRecord* block = heap.Take(size_bytes);
        // A block is found whenever any hole is large enough: nothing is lost between buckets.
        ASSERT_EQ(block != nullptr, reference.LargestHole() >= size_bytes);
        if (block == nullptr) continue;
        ASSERT_EQ(block->capacity_bytes, size_bytes);
        ASSERT_NO_FATAL_FAILURE(reference.Take(Address(block), size_bytes));
        live.push_back(block);
      } else {
        std::swap(live[random() % live.size()], live.back());
        reference.Put(Address(live.back()));
        heap.Put(live.back());
        live.pop_back();
      }
    }
    for (BlockRecord* block : live) heap.Put(block);
    ASSERT_EQ(heap.large_free_bytes(), heap.segment_bytes());
    ASSERT_EQ(heap.RemoveFreeSegments({}).size(), 3u);
  }
}

}  // namespace
}  // namespace pinion::internal
