#include "pinion/allocator/heap/segment_heap.h"

#include <malloc.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/heap/block_records.h"
#include "pinion/allocator/heap/size_class.h"
#include "pinion/allocator/host_memory_source.h"

namespace pinion::internal {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

constexpr uint64_t kPage = 4096;
constexpr uint64_t kSlab = 64 * kKiB;

// The heap never touches the memory, so the addresses may be invented.
HostSegment FakeSegment(uint64_t address, uint64_t size_bytes) {
  return {.data = reinterpret_cast<void*>(address), .size_bytes = size_bytes};
}

void AddSegment(SegmentHeap& heap, const HostSegment& segment, bool joins = false) {
  heap.AddSegment(segment, [joins](const void*) {
    return joins ? SegmentHeap::Border::kOpen : SegmentHeap::Border::kCloses;
  });
}

// 0 without a block.
uint64_t Address(const BlockRecord* block) {
  return block == nullptr ? 0 : reinterpret_cast<uint64_t>(block->data);
}

class SegmentHeapTest : public ::testing::Test {
 protected:
  void Add(uint64_t address, uint64_t size_bytes) {
    AddSegment(heap_, FakeSegment(address, size_bytes));
  }
  // Adds adjacent segments from 1 GiB on whose blocks may join.
  void AddJoined(std::initializer_list<uint64_t> sizes_bytes) {
    uint64_t address = kGiB;
    for (const uint64_t size_bytes : sizes_bytes) {
      AddSegment(heap_, FakeSegment(address, size_bytes), /*joins=*/true);
      address += size_bytes;
    }
  }
  // Removes the free segments in holes of at least `hole_bytes`.
  std::vector<uint64_t> RemovedAddresses(uint64_t hole_bytes = kMinBlockBytes) {
    std::vector<uint64_t> addresses;
    for (const HostSegment& segment : heap_.RemoveFreeSegments(UINT64_MAX, hole_bytes)) {
      addresses.push_back(reinterpret_cast<uint64_t>(segment.data));
    }
    return addresses;
  }

  SegmentHeap heap_{kPage, kSlab};
};

TEST_F(SegmentHeapTest, BlocksAreCutToTheirSize) {
  EXPECT_EQ(heap_.Take(kMiB), nullptr);
  Add(kGiB, 4 * kMiB);
  EXPECT_EQ(Address(heap_.Take(kMiB)), kGiB);
  EXPECT_EQ(Address(heap_.Take(3 * kMiB)), kGiB + kMiB);
  EXPECT_EQ(heap_.Take(kSmallLimitBytes), nullptr);
  EXPECT_EQ(heap_.large_free_bytes(), 0u);
}

TEST_F(SegmentHeapTest, NeighboursJoinInWhateverOrderTheyComeBack) {
  std::vector<int> order = {0, 1, 2, 3};
  Add(kGiB, 4 * kMiB);
  do {
    std::vector<BlockRecord*> blocks;
    for (int i = 0; i < 4; ++i) blocks.push_back(heap_.Take(kMiB));
    for (const int i : order) heap_.Put(blocks[i]);
    BlockRecord* const whole = heap_.Take(4 * kMiB);
    ASSERT_EQ(Address(whole), kGiB);
    heap_.Put(whole);
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_F(SegmentHeapTest, BlocksOfDifferentSegmentsDoNotJoinEvenIfTheyTouch) {
  Add(kGiB, kMiB);
  Add(kGiB + kMiB, kMiB);
  EXPECT_EQ(heap_.Take(2 * kMiB), nullptr);
  Add(kGiB - kMiB, kMiB);
  EXPECT_EQ(heap_.Take(2 * kMiB), nullptr);
}

TEST_F(SegmentHeapTest, TheTightestHoleIsTaken) {
  Add(1 * kGiB, 8 * kMiB);
  Add(2 * kGiB, 3 * kMiB);
  Add(3 * kGiB, 5 * kMiB);
  EXPECT_EQ(Address(heap_.Take(3 * kMiB)), 2 * kGiB);
  EXPECT_EQ(Address(heap_.Take(4 * kMiB)), 3 * kGiB);
}

TEST_F(SegmentHeapTest, ALargeHoleThatFitsExactlyIsFoundBehindSmallerOnesOfItsBucket) {
  const uint64_t size_bytes = 518 * kMiB;  // in the bucket of 512 to 520 MiB
  Add(1 * kGiB, size_bytes);
  Add(2 * kGiB, size_bytes - 2 * kMiB);
  EXPECT_EQ(Address(heap_.Take(size_bytes)), kGiB);
}

TEST_F(SegmentHeapTest, SmallBlocksShareASlab) {
  EXPECT_EQ(heap_.Take(kMinBlockBytes), nullptr);
  Add(kGiB, kMiB);
  EXPECT_EQ(Address(heap_.Take(kMinBlockBytes)), kGiB);
  EXPECT_EQ(Address(heap_.Take(kMinBlockBytes)), kGiB + kMinBlockBytes);
  EXPECT_EQ(heap_.large_free_bytes(), kMiB - kSlab);
  EXPECT_EQ(Address(heap_.Take(kSmallLimitBytes)), kGiB + kSlab);
}

TEST_F(SegmentHeapTest, ASlabThatDoesNotFitIsAsSmallAsItsBlock) {
  Add(kGiB, kPage);
  EXPECT_EQ(Address(heap_.Take(kMinBlockBytes)), kGiB);
  EXPECT_EQ(Address(heap_.Take(kMinBlockBytes)), kGiB + kMinBlockBytes);
  EXPECT_EQ(heap_.large_free_bytes(), 0u);
}

TEST_F(SegmentHeapTest, SlabsKeepTheAlignmentOfLargeBlocks) {
  constexpr uint64_t kAlignment = 2 * kMiB;
  SegmentHeap heap(kAlignment, kSlab);
  AddSegment(heap, FakeSegment(kGiB, 8 * kMiB));
  ASSERT_NE(heap.Take(kMinBlockBytes), nullptr);
  EXPECT_EQ(Address(heap.Take(kAlignment)) % kAlignment, 0u);
}

TEST_F(SegmentHeapTest, AFreeSlabMakesRoomForALargeBlock) {
  Add(kGiB, kMiB);
  BlockRecord* small = heap_.Take(kMinBlockBytes);
  EXPECT_EQ(heap_.Take(kMiB), nullptr);
  heap_.Put(small);
  EXPECT_EQ(heap_.large_free_bytes(), kMiB - kSlab);  // the slab is cached for the next small block
  EXPECT_NE(heap_.Take(kMiB), nullptr);
}

TEST_F(SegmentHeapTest, OnlyWhollyFreeSegmentsAreRemoved) {
  Add(1 * kGiB, kMiB);
  BlockRecord* const used = heap_.Take(512 * kKiB);
  Add(2 * kGiB, kMiB);
  EXPECT_THAT(RemovedAddresses(), ElementsAre(2 * kGiB));
  heap_.Put(used);
  EXPECT_THAT(RemovedAddresses(), ElementsAre(kGiB));
  EXPECT_EQ(heap_.segment_bytes(), 0u);
  EXPECT_EQ(heap_.large_free_bytes(), 0u);
}

TEST_F(SegmentHeapTest, ASegmentWhoseSlabsAreFreeIsRemoved) {
  Add(kGiB, kMiB);
  BlockRecord* const small = heap_.Take(kMinBlockBytes);
  EXPECT_THAT(RemovedAddresses(), IsEmpty());
  heap_.Put(small);
  EXPECT_THAT(RemovedAddresses(), ElementsAre(kGiB));
}

TEST_F(SegmentHeapTest, UsedBytesAreAddedUpByNode) {
  EXPECT_THAT(heap_.UsedBytesByNode(), IsEmpty());
  HostSegment memory = FakeSegment(1 * kGiB, kMiB);
  memory.numa_node = 1;
  AddSegment(heap_, memory);
  Add(2 * kGiB, 2 * kMiB);
  Add(3 * kGiB, 3 * kMiB);
  BlockRecord* block = heap_.Take(2 * kMiB);
  BlockRecord* small = heap_.Take(kMinBlockBytes);
  EXPECT_THAT(heap_.UsedBytesByNode(), ElementsAre(Pair(-1, 2 * kMiB), Pair(1, kMinBlockBytes)));
  heap_.Put(block);
  heap_.Put(small);
  EXPECT_THAT(heap_.UsedBytesByNode(), ElementsAre(Pair(-1, 0u), Pair(1, 0u)));
}

TEST_F(SegmentHeapTest, NoMoreSegmentsAreRemovedThanAskedFor) {
  for (uint64_t i = 1; i <= 4; ++i) Add(i * kGiB, kMiB);
  EXPECT_TRUE(heap_.RemoveFreeSegments(0).empty());
  EXPECT_EQ(heap_.RemoveFreeSegments(kMiB + 1).size(), 2u);
  EXPECT_EQ(heap_.segment_bytes(), 2 * kMiB);
}

TEST_F(SegmentHeapTest, SegmentsInHolesThatAreTooShortAreNotLookedAt) {
  Add(kGiB, kMiB);
  Add(2 * kGiB, 2 * kMiB);
  Add(3 * kGiB, kMiB);
  EXPECT_THAT(RemovedAddresses(/*hole_bytes=*/2 * kMiB), ElementsAre(2 * kGiB));
}

TEST_F(SegmentHeapTest, BlocksCrossBordersOfSegmentsThatMayJoinInWhateverOrderTheyCome) {
  std::vector<uint64_t> order = {0, 1, 2};
  do {
    SegmentHeap heap(kPage, kSlab);
    for (const uint64_t i : order) {
      AddSegment(heap, FakeSegment(kGiB + i * kMiB, kMiB), /*joins=*/true);
    }
    BlockRecord* block = heap.Take(3 * kMiB);
    EXPECT_EQ(Address(block), kGiB);
    heap.Put(block);
    EXPECT_EQ(heap.RemoveFreeSegments().size(), 3u);
    EXPECT_EQ(heap.segment_bytes(), 0u);
    EXPECT_EQ(heap.large_free_bytes(), 0u);
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_F(SegmentHeapTest, AFreeEndIsCutOffAndJoinsAgain) {
  AddJoined({kMiB, kMiB});
  BlockRecord* const lower = heap_.Take(kMiB / 2);
  BlockRecord* const upper = heap_.Take(kMiB);
  heap_.Put(lower);
  const std::vector<HostSegment> ends = heap_.FreeEnds();
  ASSERT_EQ(ends.size(), 2u);
  EXPECT_EQ(ends[0].size_bytes, kMiB / 2);
  EXPECT_EQ(ends[1].size_bytes, kMiB / 2);
  for (const HostSegment& end : ends) {
    const std::vector<HostSegment> removed = heap_.RemoveFreeEnd(end);
    ASSERT_EQ(removed.size(), 1u);
    EXPECT_EQ(removed[0].data, end.data);
    EXPECT_EQ(removed[0].size_bytes, end.size_bytes);
    EXPECT_TRUE(heap_.RemoveFreeEnd(end).empty()) << "it is gone";
  }
  EXPECT_EQ(heap_.segment_bytes(), kMiB);
  EXPECT_EQ(heap_.large_free_bytes(), 0u);
  EXPECT_EQ(heap_.Take(kPage), nullptr);
  for (const HostSegment& end : ends) {
    heap_.AddSegment(end, [](const void*) { return SegmentHeap::Border::kGone; });
  }
  heap_.Put(upper);
  EXPECT_EQ(heap_.RemoveFreeSegments().size(), 2u);
}

TEST_F(SegmentHeapTest, AFreeEndIsAllOfARunThatIsFree) {
  AddJoined({kMiB, kMiB});
  const std::vector<HostSegment> ends = heap_.FreeEnds();
  ASSERT_EQ(ends.size(), 1u);
  EXPECT_EQ(heap_.RemoveFreeEnd(ends[0]).size(), 2u) << "the segments that there were";
  EXPECT_THAT(heap_.UsedBytesByNode(), IsEmpty());
  EXPECT_EQ(heap_.segment_bytes(), 0u);
  EXPECT_EQ(heap_.Take(kPage), nullptr);
}

TEST_F(SegmentHeapTest, SegmentsOfDifferentNodesDoNotJoin) {
  HostSegment far = FakeSegment(kGiB + kMiB, kMiB);
  far.numa_node = 1;
  AddSegment(heap_, FakeSegment(kGiB, kMiB), /*joins=*/true);
  AddSegment(heap_, far, /*joins=*/true);
  EXPECT_EQ(heap_.Take(2 * kMiB), nullptr);
}

TEST_F(SegmentHeapTest, ASegmentInTheMidstOfARunIsRemoved) {
  AddJoined({kMiB, kMiB, kMiB});
  BlockRecord* const lower = heap_.Take(kMiB - kPage);
  BlockRecord* const middle = heap_.Take(kMiB + 2 * kPage);
  BlockRecord* const upper = heap_.Take(kMiB / 2);
  BlockRecord* const small = heap_.Take(kMinBlockBytes);  // from the upper segment
  EXPECT_THAT(RemovedAddresses(), IsEmpty());
  heap_.Put(middle);
  EXPECT_THAT(RemovedAddresses(), ElementsAre(kGiB + kMiB));
  EXPECT_EQ(heap_.UsedBytesByNode()[-1], kMiB - kPage + kMiB / 2 + kMinBlockBytes);
  for (BlockRecord* const block : {lower, upper, small}) heap_.Put(block);
  EXPECT_EQ(heap_.UsedBytesByNode()[-1], 0u);
  EXPECT_EQ(heap_.Take(kMiB + kPage), nullptr);
  EXPECT_EQ(RemovedAddresses().size(), 2u);
  EXPECT_EQ(heap_.large_free_bytes(), 0u);
}

TEST_F(SegmentHeapTest, WhatIsFreeAboveASegmentThatWasRemovedServesOn) {
  AddJoined({2 * kMiB, kMiB});
  BlockRecord* const lower = heap_.Take(5 * kMiB / 2);
  BlockRecord* const upper = heap_.Take(kMiB / 2);
  heap_.Put(lower);
  ASSERT_EQ(heap_.RemoveFreeSegments().size(), 1u);
  BlockRecord* block = heap_.Take(kMiB / 2);
  EXPECT_EQ(Address(block), kGiB + 2 * kMiB);
  heap_.Put(block);
  heap_.Put(upper);
  // A segment that is added above extends the free block.
  AddSegment(heap_, FakeSegment(kGiB + 3 * kMiB, kMiB), /*joins=*/true);
  block = heap_.Take(2 * kMiB);
  EXPECT_EQ(Address(block), kGiB + 2 * kMiB);
}

// Block records are recycled: the heap's own memory does not grow with each cycle.
TEST_F(SegmentHeapTest, WhatIsCutAndJoinedAgainTakesNoMoreMemory) {
  const auto cycle = [&] {
    AddJoined({kMiB, kMiB});
    BlockRecord* const small = heap_.Take(kMinBlockBytes);
    BlockRecord* const block = heap_.Take(kSmallLimitBytes);
    heap_.Put(small);
    heap_.Put(block);
    ASSERT_EQ(heap_.RemoveFreeSegments().size(), 2u);
  };
  cycle();
  const size_t before_bytes = mallinfo2().uordblks;
  for (int i = 0; i < 10'000; ++i) cycle();
  EXPECT_LT(mallinfo2().uordblks, before_bytes + 64 * kKiB);
}

// Reference model: the segments and the used address ranges.
class ReferenceHeap {
 public:
  void AddSegment(uint64_t address, uint64_t size_bytes) { segments_[address] = size_bytes; }

  // Fails the test if part of the segment is in use.
  void RemoveSegment(const HostSegment& segment) {
    const auto address = reinterpret_cast<uint64_t>(segment.data);
    ASSERT_TRUE(IsFree(address, segment.size_bytes));
    ASSERT_EQ(segments_.at(address), segment.size_bytes);
    segments_.erase(address);
  }

  // Fails the test if the block overlaps a used one. Other checks ensure that it lies in segments.
  void Take(uint64_t address, uint64_t size_bytes) {
    ASSERT_TRUE(IsFree(address, size_bytes));
    used_[address] = size_bytes;
  }
  void Put(uint64_t address) { used_.erase(address); }

  uint64_t LargestHole() const {
    uint64_t largest = 0;
    uint64_t hole = 0;  // length of the free range that ends at `end`
    uint64_t end = 0;
    for (const auto& [address, size_bytes] : segments_) {
      if (address != end) hole = 0;
      end = address + size_bytes;
      uint64_t at = address;
      for (auto block = FirstAfter(address); block != used_.end() && block->first < end; ++block) {
        if (block->first > at) largest = std::max(largest, hole + block->first - at);
        hole = 0;
        at = std::max(at, block->first + block->second);
      }
      if (at < end) hole += end - at;
      if (at >= end) hole = 0;
      largest = std::max(largest, hole);
    }
    return largest;
  }

  // Returns the number of free segments in free ranges of at least `hole_bytes`.
  int FreeSegments(uint64_t hole_bytes) const {
    int count = 0;
    for (auto segment = segments_.begin(); segment != segments_.end(); ++segment) {
      if (!IsFree(segment->first, segment->second)) continue;
      auto [begin, last] = std::pair(segment, segment);
      while (begin != segments_.begin() && EndOf(std::prev(begin)) == begin->first) --begin;
      while (std::next(last) != segments_.end() && std::next(last)->first == EndOf(last)) ++last;
      const auto above = FirstAfter(segment->first);
      const auto below = above == used_.begin() ? used_.end() : std::prev(above);
      const uint64_t from = below == used_.end() ? 0 : below->first + below->second;
      const uint64_t to = above == used_.end() ? UINT64_MAX : above->first;
      if (std::min(to, EndOf(last)) - std::max(from, begin->first) >= hole_bytes) ++count;
    }
    return count;
  }

 private:
  using Segment = std::map<uint64_t, uint64_t>::const_iterator;
  static uint64_t EndOf(Segment segment) { return segment->first + segment->second; }

  // Returns the first block that ends after `address`.
  std::map<uint64_t, uint64_t>::const_iterator FirstAfter(uint64_t address) const {
    auto block = used_.upper_bound(address);
    if (block != used_.begin() && std::prev(block)->first + std::prev(block)->second > address) {
      --block;
    }
    return block;
  }
  bool IsFree(uint64_t address, uint64_t size_bytes) const {
    const auto block = FirstAfter(address);
    return block == used_.end() || block->first >= address + size_bytes;
  }

  std::map<uint64_t, uint64_t> segments_;
  std::map<uint64_t, uint64_t> used_;
};

class SegmentHeapRandomTest : public ::testing::TestWithParam<std::tuple<bool, bool>> {};

// Adds and removes adjacent segments of two sizes. The parameters are whether segments join and
// whether small blocks occur. The reference does not model the slabs of small blocks.
TEST_P(SegmentHeapRandomTest, RandomOperationsAgreeWithAReference) {
  const auto [joins, small] = GetParam();
  constexpr uint64_t kSegments = 6;
  constexpr uint64_t kMostBytes = 8 * kMiB;
  constexpr uint64_t kShortBytes = 3 * kMiB;
  const auto bytes_of = [](uint64_t i) { return i % 3 == 1 ? kShortBytes : kMostBytes; };
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    SegmentHeap heap(kPage, kSlab);
    ReferenceHeap reference;
    std::map<uint64_t, uint64_t> absent;
    uint64_t next = kGiB;
    for (uint64_t i = 0; i < kSegments; ++i) {
      absent[next] = bytes_of(i);
      // In the reference, segments that do not join must not be adjacent.
      next += joins ? bytes_of(i) : 2 * kMostBytes;
    }
    uint64_t segment_bytes = 0;
    std::vector<BlockRecord*> live;
    uint64_t used_bytes = 0;
    for (int step = 0; step < 3000; ++step) {
      const uint64_t choice = random() % 100;
      if (choice < 3) {
        if (absent.empty()) continue;
        const auto which = std::next(absent.begin(), random() % absent.size());
        AddSegment(heap, FakeSegment(which->first, which->second), joins);
        reference.AddSegment(which->first, which->second);
        segment_bytes += which->second;
        absent.erase(which);
      } else if (choice < 5) {
        const bool all = random() % 2 == 0;
        const uint64_t hole_bytes = small ? kMinBlockBytes : 1 + random() % (2 * kMostBytes);
        const int free_segments = reference.FreeSegments(hole_bytes);
        const std::vector<HostSegment> removed =
            heap.RemoveFreeSegments(all ? UINT64_MAX : 1, std::max(hole_bytes, kMinBlockBytes));
        ASSERT_EQ(removed.size(), all ? free_segments : std::min(free_segments, 1));
        for (const HostSegment& segment : removed) {
          ASSERT_NO_FATAL_FAILURE(reference.RemoveSegment(segment));
          absent[reinterpret_cast<uint64_t>(segment.data)] = segment.size_bytes;
          segment_bytes -= segment.size_bytes;
        }
      } else if (choice < 55 || live.empty()) {
        const uint64_t least = small ? kMinBlockBytes : kSmallLimitBytes;
        const uint64_t wish = least << (random() % (small ? 16 : 9));
        const uint64_t size_bytes = RoundUpToSizeClass(wish + random() % wish);
        BlockRecord* block = heap.Take(size_bytes);
        // Any sufficient free range must be found, whatever bucket it is in.
        if (!small) {
          ASSERT_EQ(block != nullptr, reference.LargestHole() >= size_bytes);
        }
        if (block == nullptr) continue;
        ASSERT_EQ(block->capacity_bytes, size_bytes);
        ASSERT_NO_FATAL_FAILURE(reference.Take(Address(block), size_bytes));
        live.push_back(block);
        used_bytes += size_bytes;
      } else {
        std::swap(live[random() % live.size()], live.back());
        used_bytes -= live.back()->capacity_bytes;
        reference.Put(Address(live.back()));
        heap.Put(live.back());
        live.pop_back();
      }
      ASSERT_EQ(heap.segment_bytes(), segment_bytes);
      ASSERT_LE(heap.large_free_bytes(), segment_bytes - used_bytes);
      if (!small) {
        ASSERT_EQ(heap.large_free_bytes(), segment_bytes - used_bytes);
      }
      ASSERT_EQ(heap.UsedBytesByNode()[-1], used_bytes);
    }
    for (BlockRecord* block : live) heap.Put(block);
    ASSERT_EQ(heap.RemoveFreeSegments().size(), kSegments - absent.size());
    ASSERT_EQ(heap.large_free_bytes(), 0u);
  }
}

INSTANTIATE_TEST_SUITE_P(All, SegmentHeapRandomTest,
                         ::testing::Combine(::testing::Bool(), ::testing::Bool()),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param) ? "Joined" : "Apart") +
                                  (std::get<1>(info.param) ? "WithSmallBlocks" : "");
                         });

}  // namespace
}  // namespace pinion::internal
