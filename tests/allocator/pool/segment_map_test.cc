#include "pinion/allocator/pool/segment_map.h"

#include <cstdint>
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/heap/segment_heap.h"
#include "pinion/allocator/pool/limited_source.h"
#include "pinion/tests/support/fake_source.h"
#include "pinion/tests/support/source_adaptor.h"

namespace pinion::internal {
namespace {

constexpr uint64_t kPage = 4096;

// The map never touches the memory.
HostSegment FakeSegment(uint64_t address, uint64_t size_bytes, int numa_node = -1) {
  return {reinterpret_cast<void*>(address), size_bytes, numa_node};
}

TEST(SegmentMapTest, PiecesCoverTheirSegment) {
  for (const uint64_t size_bytes : {kPage, 5 * kMiB, kGiB, kGiB + kPage}) {
    SegmentMap map(kPage);
    uint64_t end = kGiB;
    for (const HostSegment& piece : map.Add(FakeSegment(kGiB, size_bytes, 3))) {
      EXPECT_EQ(reinterpret_cast<uint64_t>(piece.data), end);
      EXPECT_EQ(piece.numa_node, 3);
      EXPECT_EQ(reinterpret_cast<uint64_t>(piece.data) % kPage, 0u);
      end += piece.size_bytes;
    }
    EXPECT_EQ(end, kGiB + size_bytes);
    EXPECT_EQ(map.total_bytes(), size_bytes);
  }
}

TEST(SegmentMapTest, ContainsAddressesOfSegmentsAndNothingBetween) {
  SegmentMap map(kPage);
  const auto contains = [&map](uint64_t address) {
    return map.Contains(reinterpret_cast<void*>(address));
  };
  EXPECT_FALSE(contains(kGiB));
  map.Add(FakeSegment(kGiB, 8 * kMiB));
  map.Add(FakeSegment(kGiB + 16 * kMiB, 8 * kMiB));
  EXPECT_FALSE(contains(kGiB - 1));
  EXPECT_TRUE(contains(kGiB));
  EXPECT_TRUE(contains(kGiB + 8 * kMiB - 1));
  EXPECT_FALSE(contains(kGiB + 8 * kMiB));
  EXPECT_FALSE(contains(kGiB + 16 * kMiB - 1));
  EXPECT_TRUE(contains(kGiB + 16 * kMiB));
  EXPECT_FALSE(contains(kGiB + 24 * kMiB));
}

TEST(SegmentMapTest, PiecesAreMultiplesOfTheAlignment) {
  SegmentMap map(64 * kMiB);
  const std::vector<HostSegment> pieces = map.Add(FakeSegment(kGiB, 192 * kMiB));
  ASSERT_EQ(pieces.size(), 3u);
  EXPECT_EQ(pieces[0].size_bytes, 64 * kMiB);
}

TEST(SegmentMapTest, BlocksCrossBordersOfPiecesAndThoseOfSegmentsThatTheSourceJoins) {
  class Joins final : public ::pinion::testing::SourceAdaptor {
   public:
    using SourceAdaptor::SourceAdaptor;
    bool JoinsAt(const void* border) const override {
      return border == reinterpret_cast<void*>(kGiB + 8 * kMiB);
    }
  };
  const LimitedSource source(
      std::make_shared<Joins>(std::make_shared<::pinion::testing::FakeSource>()), UINT64_MAX);
  SegmentMap map(kPage);
  map.Add(FakeSegment(kGiB, 8 * kMiB));
  map.Add(FakeSegment(kGiB + 8 * kMiB, 8 * kMiB));
  map.Add(FakeSegment(kGiB + 16 * kMiB, 8 * kMiB));
  const auto border_at = [&](uint64_t offset) {
    return map.BorderAt(reinterpret_cast<void*>(kGiB + offset), source);
  };
  using Border = SegmentHeap::Border;
  EXPECT_EQ(border_at(2 * kMiB), Border::kOpen);
  EXPECT_EQ(border_at(2 * kMiB + kPage), Border::kGone);
  EXPECT_EQ(border_at(8 * kMiB), Border::kOpen);
  EXPECT_EQ(border_at(16 * kMiB), Border::kCloses);
}

TEST(SegmentMapTest, TheLeastPieceIsThatOfTheSmallestSegment) {
  SegmentMap map(kPage);
  map.Add(FakeSegment(kGiB, kGiB));
  EXPECT_EQ(map.LeastPieceBytes(), 16 * kMiB);
  map.Add(FakeSegment(2 * kGiB, 5 * kMiB));
  EXPECT_EQ(map.LeastPieceBytes(), 2 * kMiB);
  map.Add(FakeSegment(3 * kGiB, kMiB));
  EXPECT_EQ(map.LeastPieceBytes(), kMiB);
}

TEST(SegmentMapTest, ASegmentIsRemovedWhenAllItsPiecesAreFreeWhoeverHasThem) {
  SegmentMap map(kPage);
  const std::vector<HostSegment> pieces = map.Add(FakeSegment(kGiB, 4 * kMiB));
  const std::vector<HostSegment> others = map.Add(FakeSegment(2 * kGiB, 4 * kMiB));
  ASSERT_EQ(pieces.size(), 2u);
  std::vector<std::vector<HostSegment>> free = {{pieces[1], others[0]}};
  EXPECT_TRUE(map.RemoveFree({}, &free).empty());
  EXPECT_EQ(free[0].size(), 2u);

  free = {{pieces[1], others[0]}, {}, {pieces[0]}};
  const std::vector<HostSegment> removed = map.RemoveFree({}, &free);
  ASSERT_EQ(removed.size(), 1u);
  EXPECT_EQ(removed[0].data, pieces[0].data);
  EXPECT_EQ(removed[0].size_bytes, 4 * kMiB);
  ASSERT_EQ(free[0].size(), 1u);
  EXPECT_EQ(free[0][0].data, others[0].data);
  EXPECT_TRUE(free[2].empty());
  EXPECT_EQ(map.total_bytes(), 4 * kMiB);
}

class SegmentMapRemovalTest : public ::testing::Test {
 protected:
  // Segments of 1, 2 and 3 MiB, each of one piece or two.
  SegmentMapRemovalTest() {
    for (uint64_t i = 1; i <= 3; ++i) {
      // The newest segment lies between the others by address.
      const uint64_t address = i == 3 ? kGiB + kGiB / 2 : i * kGiB;
      for (const HostSegment& piece : map_.Add(FakeSegment(address, i * kMiB))) {
        free_[0].push_back(piece);
      }
    }
  }

  std::vector<uint64_t> MibRemoved(const SegmentMap::Removal& wanted) {
    std::vector<uint64_t> result;
    for (const HostSegment& segment : map_.RemoveFree(wanted, &free_)) {
      result.push_back(segment.size_bytes / kMiB);
    }
    return result;
  }

  SegmentMap map_{kPage};
  std::vector<std::vector<HostSegment>> free_ = {{}};
};

TEST_F(SegmentMapRemovalTest, TheNewestAreRemovedUntilTheyAreEnough) {
  EXPECT_EQ(MibRemoved({.bytes = 0}), std::vector<uint64_t>());
  EXPECT_EQ(MibRemoved({.bytes = 3 * kMiB + 1}), (std::vector<uint64_t>{3, 2}));
  EXPECT_EQ(MibRemoved({}), std::vector<uint64_t>{1});
}

TEST_F(SegmentMapRemovalTest, NothingIsRemovedWhereThatWouldNotBeEnough) {
  EXPECT_EQ(MibRemoved({.bytes = 6 * kMiB + 1, .all_or_none = true}), std::vector<uint64_t>());
  EXPECT_EQ(MibRemoved({.bytes = 6 * kMiB, .all_or_none = true}), (std::vector<uint64_t>{3, 2, 1}));
}

TEST_F(SegmentMapRemovalTest, OnlyLongSegmentsAreRemovedWhereThatIsAskedFor) {
  EXPECT_EQ(MibRemoved({.longer_than_bytes = 2 * kMiB}), std::vector<uint64_t>{3});
}

TEST(SegmentMapTest, NodesAddUpTheirSegments) {
  SegmentMap map(kPage);
  EXPECT_TRUE(map.NumaNodes().empty());
  map.Add(FakeSegment(1 * kGiB, kMiB, 1));
  map.Add(FakeSegment(2 * kGiB, 2 * kMiB, 0));
  map.Add(FakeSegment(3 * kGiB, 3 * kMiB, 1));
  const std::vector<NumaNodeStats> nodes = map.NumaNodes();
  ASSERT_EQ(nodes.size(), 2u);
  EXPECT_EQ(nodes[0].numa_node, 0);
  EXPECT_EQ(nodes[0].locked_bytes, 2 * kMiB);
  EXPECT_EQ(nodes[1].segments, 2u);
  EXPECT_EQ(nodes[1].locked_bytes, 4 * kMiB);
}

}  // namespace
}  // namespace pinion::internal
