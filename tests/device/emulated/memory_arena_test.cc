#include "pinion/device/emulated/memory_arena.h"

#include <sys/mman.h>

#include <cstdint>
#include <map>
#include <memory>
#include <random>

#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/tests/device/emulated/data_limit.h"

namespace pinion {
namespace {

using ::pinion::testing::DataLimit;

constexpr uint64_t kCapacity = kMiB;

std::unique_ptr<MemoryArena> MakeArena(uint64_t reserve_bytes, bool quarantine) {
  void* const mapping =
      mmap(nullptr, reserve_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return std::make_unique<MemoryArena>(mapping, reserve_bytes, quarantine);
}

TEST(MemoryArenaTest, LastFreedOfEqualSizesComesBackFirst) {
  auto arena = MakeArena(4 * kCapacity, false);
  void* data[5];
  for (void*& d : data) d = arena->Allocate(kKiB, 0, kCapacity);
  arena->Free(data[1], kKiB, 0);
  arena->Free(data[3], kKiB, 0);
  EXPECT_EQ(arena->Allocate(kKiB, 0, kCapacity), data[3]);
  EXPECT_EQ(arena->Allocate(kKiB, 0, kCapacity), data[1]);
}

TEST(MemoryArenaTest, WhatIsLeftOfARangeIsAsOldAsTheRange) {
  auto arena = MakeArena(4 * kCapacity, false);
  char* const range = static_cast<char*>(arena->Allocate(5 * kKiB, 0, kCapacity));
  arena->Allocate(kKiB, 0, kCapacity);  // separates neighbours
  void* const freed_later = arena->Allocate(2 * kKiB, 0, kCapacity);
  arena->Allocate(kKiB, 0, kCapacity);
  arena->Free(range, 5 * kKiB, 0);
  arena->Free(freed_later, 2 * kKiB, 0);
  EXPECT_EQ(arena->Allocate(3 * kKiB, 0, kCapacity), range);
  EXPECT_EQ(arena->Allocate(2 * kKiB, 0, kCapacity), freed_later);
  EXPECT_EQ(arena->Allocate(2 * kKiB, 0, kCapacity), range + 3 * kKiB);
}

TEST(MemoryArenaTest, FreedAddressGoesToOtherStreamsOnlyOncePublished) {
  auto arena = MakeArena(4 * kCapacity, false);
  void* const data = arena->Allocate(kKiB, 0, kCapacity);
  arena->Allocate(kKiB, 0, kCapacity);
  arena->Free(data, kKiB, 0);
  void* const other = arena->Allocate(kKiB, 1, kCapacity);
  EXPECT_NE(other, data);
  arena->Publish(0);
  EXPECT_EQ(arena->Allocate(kKiB, 1, kCapacity), data);
}

TEST(MemoryArenaTest, TheSmallerOfTheOwnAndTheCommonFitIsTakenAndTheOwnOneOfEquals) {
  auto arena = MakeArena(4 * kCapacity, false);
  const auto allocate = [&arena](uint64_t size_bytes) {
    void* const data = arena->Allocate(size_bytes, 0, kCapacity);
    arena->Allocate(1, 0, kCapacity);  // separates neighbours
    return data;
  };
  void* const common = allocate(2 * kKiB);
  void* const small_common = allocate(kKiB);
  void* const own = allocate(2 * kKiB);
  arena->Free(common, 2 * kKiB, 1);
  arena->Free(small_common, kKiB, 1);
  arena->Publish(1);
  arena->Free(own, 2 * kKiB, 0);
  EXPECT_EQ(arena->Allocate(kKiB, 0, kCapacity), small_common);
  EXPECT_EQ(arena->Allocate(2 * kKiB, 0, kCapacity), own);
  EXPECT_EQ(arena->Allocate(2 * kKiB, 0, kCapacity), common);
}

TEST(MemoryArenaTest, AllocationsAreAlignedAndBeginAtTheMapping) {
  auto arena = MakeArena(kCapacity, false);
  char* const first = static_cast<char*>(arena->Allocate(1, 0, kCapacity));
  EXPECT_EQ(arena->Allocate(MemoryArena::kAlignment, 0, kCapacity), first + 512);
  EXPECT_EQ(arena->Allocate(1, 0, kCapacity), first + 1024);
  EXPECT_FALSE(arena->Contains(first - 1));
  EXPECT_TRUE(arena->Contains(first));
  EXPECT_TRUE(arena->Contains(first + kCapacity - 1));
  EXPECT_FALSE(arena->Contains(first + kCapacity));
  arena.reset();
  unsigned char resident = 0;
  EXPECT_EQ(mincore(first, 1, &resident), -1) << "still mapped";
}

TEST(MemoryArenaTest, WhatIsHandedOutCanBeWrittenAndTheRestCannotYet) {
  constexpr uint64_t kReserve = 100 * kMiB;
  auto arena = MakeArena(kReserve, false);
  char* const first = static_cast<char*>(arena->Allocate(1, 0, kReserve));
  for (const uint64_t size_bytes : {kMiB, 15 * kMiB, 16 * kMiB, kKiB, 40 * kMiB}) {
    char* const data = static_cast<char*>(arena->Allocate(size_bytes, 0, kReserve));
    data[0] = data[size_bytes - 1] = 1;
  }
  EXPECT_DEATH(first[kReserve - 1] = 1, "");
  const uint64_t rest_bytes = kReserve - 72 * kMiB - kKiB - MemoryArena::kAlignment;
  char* const rest = static_cast<char*>(arena->Allocate(rest_bytes, 0, kReserve));
  ASSERT_EQ(rest + rest_bytes, first + kReserve);
  rest[rest_bytes - 1] = 1;
}

TEST(MemoryArenaTest, MemoryThatTheHostDoesNotGiveIsRefusedAndMayBeAskedForAgain) {
  constexpr uint64_t kReserve = 100 * kMiB;
  auto arena = MakeArena(kReserve, false);
  {
    const DataLimit limit(kMiB);
    EXPECT_EQ(arena->Allocate(64 * kMiB, 0, kReserve), nullptr);
  }
  EXPECT_NE(arena->Allocate(kReserve, 0, kReserve), nullptr) << "nothing is lost";
}

TEST(MemoryArenaTest, QuarantineKeepsAnAddressAsLongAsThereIsRoom) {
  auto arena = MakeArena(4 * kCapacity, true);
  void* const data = arena->Allocate(kCapacity / 4, 0, kCapacity);
  arena->Free(data, kCapacity / 4, 0);
  for (int i = 0; i < 3; ++i) {
    void* const other = arena->Allocate(kCapacity / 4, 0, kCapacity);
    EXPECT_NE(other, data);
    arena->Free(other, kCapacity / 4, 0);
  }
  EXPECT_EQ(arena->Allocate(kCapacity / 4, 0, kCapacity), data);  // the oldest first
}

TEST(MemoryArenaTest, WhatHasLeftTheQuarantineTakesNoMoreRoomInIt) {
  auto arena = MakeArena(4 * kCapacity, true);
  arena->Free(arena->Allocate(kCapacity, 0, kCapacity), kCapacity, 0);
  void* const data = arena->Allocate(kCapacity / 2, 0, kCapacity);  // ends the quarantine
  arena->Free(data, kCapacity / 2, 0);
  EXPECT_NE(arena->Allocate(kCapacity / 2, 0, kCapacity), data);
}

TEST(MemoryArenaTest, AnEmptyQuarantineHasNothingToGive) {
  auto arena = MakeArena(4 * kCapacity, true);
  EXPECT_NE(arena->Allocate(2 * kCapacity, 0, kCapacity), nullptr);
}

TEST(MemoryArenaTest, AFreedRangeIsAsLongAsItWasTakenWhateverWasAskedFor) {
  auto arena = MakeArena(4 * kKiB, false);
  void* const data = arena->Allocate(4 * kKiB - 100, 0, kCapacity);
  arena->Free(data, 4 * kKiB - 100, 0);
  EXPECT_EQ(arena->Allocate(4 * kKiB, 0, kCapacity), data);
}

TEST(MemoryArenaTest, NeighboursCoalesce) {
  auto arena = MakeArena(4 * kKiB, false);
  void* data[4];
  for (void*& d : data) d = arena->Allocate(kKiB, 0, kCapacity);
  EXPECT_EQ(arena->Allocate(1, 0, kCapacity), nullptr);
  for (int i : {0, 2, 1, 3}) arena->Free(data[i], kKiB, 0);
  EXPECT_EQ(arena->Allocate(4 * kKiB, 0, kCapacity), data[0]);
}

TEST(MemoryArenaTest, LiveRangesNeverOverlapAndRandomSizesNeverFragmentItFull) {
  for (int seed = 1; seed <= 40; ++seed) {
    std::mt19937 random(seed);
    auto arena = MakeArena(4 * kCapacity, seed % 2 == 0);
    struct Live {
      uint64_t size_bytes;
      int stream;
    };
    std::map<char*, Live> live;
    uint64_t live_bytes = 0;
    for (int step = 0; step < 3000; ++step) {
      const uint64_t size_bytes =
          MemoryArena::kAlignment * (1 + (random() % 8 == 0 ? random() % 200 : random() % 8));
      const int stream = random() % 3;
      if (random() % 2 == 0 && live_bytes + size_bytes <= kCapacity) {
        char* const data = static_cast<char*>(arena->Allocate(size_bytes, stream, kCapacity));
        ASSERT_NE(data, nullptr) << "seed " << seed << ", step " << step;
        ASSERT_TRUE(arena->Contains(data) && arena->Contains(data + size_bytes - 1));
        const auto next = live.lower_bound(data);
        ASSERT_TRUE(next == live.end() || data + size_bytes <= next->first) << "seed " << seed;
        if (next != live.begin()) {
          const auto previous = std::prev(next);
          ASSERT_LE(previous->first + previous->second.size_bytes, data) << "seed " << seed;
        }
        live[data] = {size_bytes, stream};
        live_bytes += size_bytes;
      } else if (!live.empty()) {
        auto it = live.begin();
        std::advance(it, random() % live.size());
        arena->Free(it->first, it->second.size_bytes, it->second.stream);
        live_bytes -= it->second.size_bytes;
        live.erase(it);
        if (random() % 50 == 0) arena->Publish(random() % 3);
      }
    }
  }
}

}  // namespace
}  // namespace pinion
