#include "pinion/allocator/base/slab.h"

#include <barrier>
#include <cstdint>
#include <cstring>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/allocator/base/thread_slot.h"
#include "pinion/tests/support/run_threads.h"

namespace pinion {
namespace {

using ::pinion::testing::RunThreads;

constexpr size_t kBlockBytes = 192;

// Keeps each slab for the process's lifetime, because a slab never frees its memory. Gives this
// thread a slot, and with it a cache of its own.
Slab& NewSlab() {
  (void)ThreadSlot();
  static auto* const slabs = new std::vector<std::unique_ptr<Slab>>;
  return *slabs->emplace_back(std::make_unique<Slab>(kBlockBytes));
}

// Blocks filled with a number, so that a block that is handed out twice is noticed.
class Blocks {
 public:
  explicit Blocks(Slab& slab) : slab_(slab) {}

  void Take(int count, uint8_t number) {
    for (int i = 0; i < count; ++i) {
      auto* const block = static_cast<uint8_t*>(slab_.Take());
      std::memset(block, number, kBlockBytes);
      all_.push_back(block);
    }
  }
  // Checks that no other holder wrote to the blocks, and gives them back.
  void GiveAll(uint8_t number) {
    for (uint8_t* block : all_) {
      for (size_t i = 0; i < kBlockBytes; ++i) ASSERT_EQ(block[i], number);
      slab_.Give(block);
    }
    all_.clear();
  }
  std::set<void*> addresses() const { return {all_.begin(), all_.end()}; }

 private:
  Slab& slab_;
  std::vector<uint8_t*> all_;
};

TEST(SlabTest, BlocksAreApartAndAligned) {
  Slab& slab = NewSlab();
  Blocks blocks(slab);
  blocks.Take(1000, 7);
  for (void* block : blocks.addresses()) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(block) % Slab::kAlignmentBytes, 0u);
  }
  EXPECT_EQ(blocks.addresses().size(), 1000u);
  blocks.GiveAll(7);
}

TEST(SlabTest, TheBlockThatWasGivenBackLastIsTakenNext) {
  Slab& slab = NewSlab();
  void* const first = slab.Take();
  void* const second = slab.Take();
  slab.Give(first);
  slab.Give(second);
  EXPECT_EQ(slab.Take(), second);
  EXPECT_EQ(slab.Take(), first);
}

TEST(SlabTest, AsManyBlocksAsWereGivenBackAreTakenAgain) {
  Slab& slab = NewSlab();
  Blocks blocks(slab);
  constexpr int kCount = 5 * Slab::kBatch + 3;
  blocks.Take(kCount, 1);
  const std::set<void*> before = blocks.addresses();
  blocks.GiveAll(1);
  blocks.Take(kCount, 2);
  EXPECT_EQ(blocks.addresses(), before);
  blocks.GiveAll(2);
}

TEST(SlabTest, WhatOneThreadGivesBackAnotherOneTakes) {
  Slab& slab = NewSlab();
  Blocks blocks(slab);
  constexpr int kCount = 10 * Slab::kBatch;
  blocks.Take(kCount, 1);
  const std::set<void*> before = blocks.addresses();
  // The giving thread caches at most two batches; this thread gets the others.
  std::thread([&] {
    (void)ThreadSlot();
    blocks.GiveAll(1);
  }).join();
  blocks.Take(kCount, 2);
  int known = 0;
  for (void* block : blocks.addresses()) known += before.contains(block) ? 1 : 0;
  EXPECT_GE(known, kCount - 2 * Slab::kBatch);
  blocks.GiveAll(2);
}

TEST(SlabTest, NoTwoThreadsHaveABlockAtOnce) {
  Slab& slab = NewSlab();
  constexpr int kThreads = 4;
  std::vector<Blocks> blocks(kThreads, Blocks(slab));
  std::barrier all(kThreads);
  RunThreads(kThreads, [&](int thread) {
    (void)ThreadSlot();
    const int next = (thread + 1) % kThreads;
    for (int round = 0; round < 50; ++round) {
      blocks[thread].Take(3 * Slab::kBatch + thread, static_cast<uint8_t>(thread + 1));
      all.arrive_and_wait();
      blocks[next].GiveAll(static_cast<uint8_t>(next + 1));
      all.arrive_and_wait();
    }
  });
}

TEST(SlabTest, ThreadsWithoutANumberTakeWhatOthersWithoutOneGaveBack) {
  Slab& slab = NewSlab();
  Blocks blocks(slab);
  constexpr int kCount = 10 * Slab::kBatch;
  std::set<void*> before;
  std::thread([&] {
    blocks.Take(kCount, 1);
    before = blocks.addresses();
    blocks.GiveAll(1);
    EXPECT_EQ(ThreadSlotIfAny(), kNoThreadSlot);
  }).join();
  std::thread([&] { blocks.Take(kCount, 2); }).join();
  EXPECT_EQ(blocks.addresses(), before);
  blocks.GiveAll(2);
}

// Threads beyond the number of slots have no cache of their own.
TEST(SlabTest, ThreadsThatGetNoNumberHaveBlocks) {
  Slab& slab = NewSlab();
  constexpr int kThreads = kThreadSlots + 4;
  std::barrier all(kThreads);
  RunThreads(kThreads, [&](int thread) {
    (void)ThreadSlot();
    Blocks blocks(slab);
    blocks.Take(2 * Slab::kBatch + 1, static_cast<uint8_t>(thread));
    all.arrive_and_wait();
    blocks.GiveAll(static_cast<uint8_t>(thread));
  });
}

TEST(SlabAllocatorTest, SharedObjectsAreMadeOfASlab) {
  struct Object {
    std::array<int, 40> values = {};
  };
  const auto made = [] { return std::allocate_shared<Object>(SlabAllocator<Object>()); };
  std::vector<std::shared_ptr<Object>> objects;
  for (int i = 0; i < 500; ++i) {
    objects.push_back(made());
    objects.back()->values.fill(i);
  }
  for (int i = 0; i < 500; ++i) EXPECT_EQ(objects[i]->values.back(), i);
}

struct Shape {
  virtual ~Shape() = default;
};
struct Square final : public Shape, public SlabObject<Square> {
  std::array<int, 60> sides = {};
};

TEST(SlabObjectTest, ANewObjectHasTheBlockOfTheLastOne) {
  const void* before = nullptr;
  {
    const std::unique_ptr<Shape> square = std::make_unique<Square>();
    before = square.get();
  }
#if !defined(ABSL_HAVE_ADDRESS_SANITIZER) && !defined(ABSL_HAVE_THREAD_SANITIZER)
  EXPECT_EQ(std::make_unique<Square>().get(), before);
#else
  EXPECT_NE(before, nullptr);
#endif
}

}  // namespace
}  // namespace pinion
