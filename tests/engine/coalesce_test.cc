#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <vector>

#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/engine/copy_lane.h"

namespace pinion::internal {
namespace {

using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::IsEmpty;
using ::testing::SizeIs;

char host[4096];
char memory[4096];

CopyPiece Piece(uint64_t dst, uint64_t src, uint64_t size_bytes) {
  return {memory + dst, host + src, size_bytes};
}

MATCHER_P3(IsPiece, dst, src, size_bytes, "") {
  return arg.dst == dst && arg.src == src && arg.size_bytes == uint64_t{size_bytes};
}

// Returns the source byte of each destination byte.
std::map<const char*, const char*> BytesOf(absl::Span<const CopyPiece> pieces) {
  std::map<const char*, const char*> bytes;
  for (const CopyPiece& piece : pieces) {
    for (uint64_t i = 0; i < piece.size_bytes; ++i) {
      bytes[static_cast<const char*>(piece.dst) + i] = static_cast<const char*>(piece.src) + i;
    }
  }
  return bytes;
}

TEST(CoalesceTest, NothingStaysNothing) { EXPECT_THAT(CoalescePieces({}, {}), IsEmpty()); }

TEST(CoalesceTest, NeighboursOnBothSidesBecomeOnePiece) {
  EXPECT_THAT(CoalescePieces({Piece(0, 100, 10), Piece(10, 110, 5)}, {}),
              ElementsAre(IsPiece(memory, host + 100, 15u)));
}

TEST(CoalesceTest, TheOrderOfThePiecesDoesNotMatter) {
  EXPECT_THAT(CoalescePieces({Piece(20, 120, 4), Piece(0, 100, 10), Piece(10, 110, 10)}, {}),
              SizeIs(1));
}

TEST(CoalesceTest, NeighboursOnOneSideOnlyStayApart) {
  EXPECT_THAT(CoalescePieces({Piece(0, 100, 10), Piece(10, 111, 5)}, {}), SizeIs(2));
  EXPECT_THAT(CoalescePieces({Piece(0, 100, 10), Piece(11, 110, 5)}, {}), SizeIs(2));
}

TEST(CoalesceTest, SourcesInTheOtherOrderStayApart) {
  EXPECT_THAT(CoalescePieces({Piece(0, 110, 10), Piece(10, 100, 10)}, {}), SizeIs(2));
}

// Two adjacent host blocks may belong to different pinned segments, in either direction.
TEST(CoalesceTest, NeighboursOfTwoHostBlocksStayApart) {
  const std::vector<CopyPiece> in = {Piece(0, 100, 10), Piece(10, 110, 5), Piece(15, 115, 5)};
  std::vector<CopyPiece> out;
  for (const CopyPiece& piece : in) {
    out.push_back({const_cast<void*>(piece.src), piece.dst, piece.size_bytes});
  }
  for (const std::vector<CopyPiece>& pieces : {in, out}) {
    EXPECT_THAT(
        CoalescePieces(pieces, {host + 110, host + 100}),
        ElementsAre(Field(&CopyPiece::size_bytes, 10u), Field(&CopyPiece::size_bytes, 10u)));
  }
}

TEST(CoalesceTest, RandomPiecesCopyTheSameBytesAndLeaveNoNeighbours) {
  for (uint32_t seed = 1; seed <= 300; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    std::vector<CopyPiece> pieces;
    uint64_t dst = 0;
    uint64_t src = 0;
    while (pieces.size() < 40) {
      if (random() % 3 == 0) dst += random() % 3;
      if (random() % 3 == 0) src = random() % 2000;
      const uint64_t size_bytes = 1 + random() % 50;
      pieces.push_back(Piece(dst, src, size_bytes));
      dst += size_bytes;
      src += size_bytes;
    }
    std::shuffle(pieces.begin(), pieces.end(), random);

    const CopyPieces merged = CoalescePieces(pieces, {});

    EXPECT_EQ(BytesOf(merged), BytesOf(pieces));
    for (const CopyPiece& a : merged) {
      for (const CopyPiece& b : merged) {
        const bool adjacent = static_cast<char*>(a.dst) + a.size_bytes == b.dst &&
                              static_cast<const char*>(a.src) + a.size_bytes == b.src;
        EXPECT_FALSE(adjacent);
      }
    }
  }
}

TEST(SortPiecesTest, SortsByDestinationAndMergesNothing) {
  EXPECT_THAT(SortPieces({Piece(10, 110, 10), Piece(0, 100, 10)}),
              ElementsAre(IsPiece(memory, host + 100, 10u), IsPiece(memory + 10, host + 110, 10u)));
}

char large_host[64 * 1024];
char large_memory[64 * 1024];

TEST(SlicePiecesTest, APieceIsCutWhereItsPartsStayAligned) {
  const std::vector<CopyPiece> pieces = {{large_memory, large_host, 3},
                                         {large_memory + 4096, large_host + 4096, 40'000}};
  // 9997 bytes of the second piece would fit; alignment cuts it to 8192.
  EXPECT_THAT(SlicePieces(pieces, 0, 10'000),
              ElementsAre(IsPiece(large_memory, large_host, 3u),
                          IsPiece(large_memory + 4096, large_host + 4096, 8192u)));
  EXPECT_THAT(SlicePieces(pieces, 3 + 8192, 10'000),
              ElementsAre(IsPiece(large_memory + 4096 + 8192, large_host + 4096 + 8192, 8192u)));
}

TEST(SlicePiecesTest, APieceThatJustFitsIsNotCut) {
  const std::vector<CopyPiece> pieces = {{large_memory, large_host, 5000},
                                         {large_memory + 5000, large_host, 6000}};
  EXPECT_EQ(TotalBytes(SlicePieces(pieces, 0, 5000)), 5000u);
  EXPECT_THAT(SlicePieces(pieces, 5000, 6000),
              ElementsAre(IsPiece(large_memory + 5000, large_host, 6000u)));
}

TEST(SlicePiecesTest, APieceThatCannotBeCutAlignedIsLeftForTheNextSlice) {
  const std::vector<CopyPiece> pieces = {{large_memory, large_host, 3},
                                         {large_memory + 4096, large_host + 4096, 5000}};
  EXPECT_THAT(SlicePieces(pieces, 0, 100), SizeIs(1));
}

TEST(SlicePiecesTest, ALimitBelowTheAlignmentCutsAnyhow) {
  EXPECT_THAT(SlicePieces({{large_memory, large_host, 5000}}, 10, 100),
              ElementsAre(IsPiece(large_memory + 10, large_host + 10, 100u)));
}

TEST(SlicePiecesTest, RandomSlicesOneAfterAnotherCopyTheSameBytes) {
  for (uint32_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const uint64_t largest_piece = 1 + random() % 12'000;
    std::vector<CopyPiece> pieces;
    uint64_t dst = 0;
    while (dst + largest_piece < sizeof(large_memory)) {
      const uint64_t size_bytes = 1 + random() % largest_piece;
      const uint64_t src = random() % (sizeof(large_host) - size_bytes);
      pieces.push_back({large_memory + dst, large_host + src, size_bytes});
      dst += size_bytes + random() % 2;
    }
    const uint64_t limit = 1 + random() % 20'000;
    const uint64_t total = TotalBytes(pieces);

    std::vector<CopyPiece> sliced;
    uint64_t sent = 0;
    while (sent < total) {
      const CopyPieces slice = SlicePieces(pieces, sent, limit);
      const uint64_t size_bytes = TotalBytes(slice);
      ASSERT_GT(size_bytes, 0u);
      ASSERT_LE(size_bytes, limit);
      // Alignment must not make chunks much smaller than allowed.
      EXPECT_TRUE(sent + size_bytes == total || size_bytes + 4096 > limit);
      sent += size_bytes;
      sliced.insert(sliced.end(), slice.begin(), slice.end());
    }

    EXPECT_EQ(sent, total);
    EXPECT_EQ(BytesOf(sliced), BytesOf(pieces));
  }
}

TEST(SlicePiecesDeathTest, NothingLiesBehindTheEnd) {
  EXPECT_DEATH(SlicePieces({Piece(0, 0, 10)}, 10, 5), "an empty slice");
  EXPECT_DEATH(SlicePieces({Piece(0, 0, 10)}, 0, 0), "an empty slice");
}

}  // namespace
}  // namespace pinion::internal
