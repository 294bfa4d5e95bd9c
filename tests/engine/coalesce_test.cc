#include "pinion/engine/coalesce.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace pinion {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;

char host[4096];
char memory[4096];

CopyPiece Piece(uint64_t dst, uint64_t src, uint64_t size_bytes) {
  return {memory + dst, host + src, size_bytes};
}

// Which source byte each destination byte gets.
std::map<const char*, const char*> BytesOf(const std::vector<CopyPiece>& pieces) {
  std::map<const char*, const char*> bytes;
  for (const CopyPiece& piece : pieces) {
    for (uint64_t i = 0; i < piece.size_bytes; ++i) {
      bytes[static_cast<const char*>(piece.dst) + i] = static_cast<const char*>(piece.src) + i;
    }
  }
  return bytes;
}

TEST(CoalesceTest, NothingStaysNothing) { EXPECT_THAT(CoalescePieces({}), IsEmpty()); }

TEST(CoalesceTest, NeighboursOnBothSidesBecomeOnePiece) {
  const std::vector<CopyPiece> merged = CoalescePieces({Piece(0, 100, 10), Piece(10, 110, 5)});
  ASSERT_THAT(merged, SizeIs(1));
  EXPECT_EQ(merged[0].dst, memory);
  EXPECT_EQ(merged[0].src, host + 100);
  EXPECT_EQ(merged[0].size_bytes, 15u);
}

TEST(CoalesceTest, TheOrderOfThePiecesDoesNotMatter) {
  EXPECT_THAT(CoalescePieces({Piece(20, 120, 4), Piece(0, 100, 10), Piece(10, 110, 10)}),
              SizeIs(1));
}

TEST(CoalesceTest, NeighboursOnOneSideOnlyStayApart) {
  EXPECT_THAT(CoalescePieces({Piece(0, 100, 10), Piece(10, 111, 5)}), SizeIs(2));
  EXPECT_THAT(CoalescePieces({Piece(0, 100, 10), Piece(11, 110, 5)}), SizeIs(2));
}

TEST(CoalesceTest, SourcesInTheOtherOrderStayApart) {
  EXPECT_THAT(CoalescePieces({Piece(0, 110, 10), Piece(10, 100, 10)}), SizeIs(2));
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

    const std::vector<CopyPiece> merged = CoalescePieces(pieces);

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

}  // namespace
}  // namespace pinion
