// Checks the look-up of pinned blocks by context and by address, also from many threads.

#include "pinion/hooks/pin_memory/held_blocks.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/thread_slot.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/tests/support/fake_host.h"
#include "pinion/tests/support/fake_source.h"
#include "pinion/tests/support/run_threads.h"

namespace pinion {
namespace {

using ::pinion::testing::FakeHost;
using ::pinion::testing::FakeSource;
using ::pinion::testing::RunThreads;

class HeldBlocksTest : public ::testing::Test {
 protected:
  HeldBlocksTest() {
    AllocatorOptions options;
    options.segment_bytes = 16 * kMiB;
    allocator_ =
        PinnedAllocator::Create(options, std::make_shared<FakeSource>(), FakeHost().Probe())
            .value();
  }

  PinnedBlock Take(uint64_t size_bytes) { return allocator_->Allocate(size_bytes).value(); }

  // Holds a new block and returns its address and record.
  std::pair<const char*, HeldBlock*> Hold(uint64_t size_bytes) {
    PinnedBlock block = Take(size_bytes);
    const auto* const data = static_cast<const char*>(block.data());
    return {data, &held_.Hold(std::move(block))};
  }

  std::shared_ptr<PinnedAllocator> allocator_;
  HeldBlocks held_{nullptr};
};

TEST_F(HeldBlocksTest, ABlockIsFoundByItsContextAndByAnyAddressWithinUntilItGoes) {
  const auto [data, held] = Hold(1000);
  const auto [other_data, other] = Hold(1000);
  int foreign = 0;
  EXPECT_EQ(held_.FindByContext(data, held), held);
  EXPECT_EQ(held_.FindByContext(data + 999, held), held);
  EXPECT_EQ(held_.FindByAddress(data), held);
  EXPECT_EQ(held_.FindByAddress(data + 999), held);
  EXPECT_EQ(held_.FindByContext(data, nullptr), nullptr);
  EXPECT_EQ(held_.FindByContext(data, &foreign), nullptr);
  EXPECT_EQ(held_.FindByContext(data, other), nullptr);  // of another block
  EXPECT_EQ(held_.FindByContext(data, reinterpret_cast<char*>(held) + 1), nullptr);
  EXPECT_EQ(held_.FindByAddress(data + 1000), nullptr);
  EXPECT_EQ(held_.FindByContext(&foreign, held), nullptr);
  EXPECT_EQ(held_.FindByAddress(&foreign), nullptr);
  EXPECT_EQ(held_.LetGo(*held).size_bytes(), 1000u);
  EXPECT_EQ(held_.FindByContext(data, held), nullptr);
  EXPECT_EQ(held_.FindByAddress(data), nullptr);
  EXPECT_EQ(held_.FindByAddress(other_data), other);
  held_.LetGo(*other);
}

TEST_F(HeldBlocksTest, EveryBlockOfThousandsIsFound) {
  std::vector<std::pair<const char*, HeldBlock*>> blocks;
  for (int i = 0; i < 3000; ++i) blocks.push_back(Hold(256));
  for (const auto& [data, held] : blocks) {
    ASSERT_EQ(held_.FindByContext(data, held), held);
    ASSERT_EQ(held_.FindByAddress(data + 100), held);
  }
  for (const auto& [_, held] : blocks) held_.LetGo(*held);
}

TEST_F(HeldBlocksTest, RecordsThatOneThreadHasLetGoOfServeTheOneThatHolds) {
  std::set<HeldBlock*> records;
  for (int round = 0; round < 50; ++round) {
    std::vector<HeldBlock*> blocks;
    for (int i = 0; i < 200; ++i) blocks.push_back(Hold(256).second);
    records.insert(blocks.begin(), blocks.end());
    std::thread([&] {
      for (HeldBlock* held : blocks) held_.LetGo(*held);
    }).join();
  }
  EXPECT_LE(records.size(), 1000u);
}

TEST_F(HeldBlocksTest, CountsAreExactWhoeverLetsGo) {
  std::vector<HeldBlock*> blocks;
  for (int i = 0; i < 10; ++i) blocks.push_back(Hold(40000).second);
  const int64_t each = 40 * 1024;
  EXPECT_EQ(held_.GetStats().requests.current, 10);
  EXPECT_EQ(held_.GetStats().bytes.current, 10 * each);
  std::thread([&] {
    for (int i = 0; i < 4; ++i) held_.LetGo(*blocks[i]);
  }).join();
  for (int i = 4; i < 7; ++i) held_.LetGo(*blocks[i]);
  HeldBlocks::Stats stats = held_.GetStats();
  EXPECT_EQ(stats.requests.allocated, 10);
  EXPECT_EQ(stats.requests.freed, 7);
  EXPECT_EQ(stats.requests.current, 3);
  EXPECT_EQ(stats.requests.peak, 10);
  EXPECT_EQ(stats.bytes.current, 3 * each);
  EXPECT_EQ(stats.bytes.peak, 10 * each);
  held_.ResetPeaks();
  held_.ResetAccumulated();
  held_.LetGo(*blocks[7]);
  stats = held_.GetStats();
  EXPECT_EQ(stats.requests.peak, 3);
  EXPECT_EQ(stats.bytes.peak, 3 * each);
  EXPECT_EQ(stats.requests.allocated, 0);
  EXPECT_EQ(stats.requests.freed, 1);
  EXPECT_EQ(stats.requests.current, 2);
  for (int i = 8; i < 10; ++i) held_.LetGo(*blocks[i]);
}

// Threads beyond the number of slots share a list.
TEST_F(HeldBlocksTest, AnyNumberOfThreadsMayHoldAndFindAndLetGo) {
  constexpr int kThreads = kThreadSlots + 6;
  std::atomic<int> lost = 0;
  std::atomic<int> waiting = 0;
  RunThreads(kThreads, [&](int) {
    ThreadSlot();
    for (++waiting; waiting < kThreads;) std::this_thread::yield();
    const auto [mine, held] = Hold(1000);
    for (int i = 0; i < 50; ++i) {
      const auto [data, other] = Hold(256);
      if (held_.FindByContext(data, other) != other) ++lost;
      if (held_.FindByAddress(mine + 500) != held) ++lost;
      held_.LetGo(*other);
    }
    held_.LetGo(*held);
  });
  EXPECT_EQ(lost, 0);
  EXPECT_EQ(held_.GetStats().requests.current, 0);
  EXPECT_EQ(held_.GetStats().requests.allocated, kThreads * 51);
}

}  // namespace
}  // namespace pinion
