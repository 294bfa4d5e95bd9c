// Checks the look-up of pinned blocks by context and by address, also from many threads.

#include "pinion/hooks/pin_memory/pinned_block_registry.h"

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

class PinnedBlockRegistryTest : public ::testing::Test {
 protected:
  PinnedBlockRegistryTest() {
    AllocatorOptions options;
    options.segment_bytes = 16 * kMiB;
    allocator_ =
        PinnedAllocator::Create(options, std::make_shared<FakeSource>(), FakeHost().Probe())
            .value();
  }

  PinnedBlock Take(uint64_t size_bytes) { return allocator_->Allocate(size_bytes).value(); }

  // Adds a new block and returns its address and record.
  std::pair<const char*, PinnedBlockRecord*> Add(uint64_t size_bytes) {
    PinnedBlock block = Take(size_bytes);
    const auto* const data = static_cast<const char*>(block.data());
    return {data, &registry_.Add(std::move(block))};
  }

  std::shared_ptr<PinnedAllocator> allocator_;
  PinnedBlockRegistry registry_{nullptr};
};

TEST_F(PinnedBlockRegistryTest, ABlockIsFoundByItsContextAndByAnyAddressWithinUntilItGoes) {
  const auto [data, record] = Add(1000);
  const auto [other_data, other] = Add(1000);
  int foreign = 0;
  EXPECT_EQ(registry_.FindByContext(data, record), record);
  EXPECT_EQ(registry_.FindByContext(data + 999, record), record);
  EXPECT_EQ(registry_.FindByAddress(data), record);
  EXPECT_EQ(registry_.FindByAddress(data + 999), record);
  EXPECT_EQ(registry_.FindByContext(data, nullptr), nullptr);
  EXPECT_EQ(registry_.FindByContext(data, &foreign), nullptr);
  EXPECT_EQ(registry_.FindByContext(data, other), nullptr);  // of another block
  EXPECT_EQ(registry_.FindByContext(data, reinterpret_cast<char*>(record) + 1), nullptr);
  EXPECT_EQ(registry_.FindByAddress(data + 1000), nullptr);
  EXPECT_EQ(registry_.FindByContext(&foreign, record), nullptr);
  EXPECT_EQ(registry_.FindByAddress(&foreign), nullptr);
  EXPECT_EQ(registry_.Remove(*record).size_bytes(), 1000u);
  EXPECT_EQ(registry_.FindByContext(data, record), nullptr);
  EXPECT_EQ(registry_.FindByAddress(data), nullptr);
  EXPECT_EQ(registry_.FindByAddress(other_data), other);
  registry_.Remove(*other);
}

TEST_F(PinnedBlockRegistryTest, EveryBlockOfThousandsIsFound) {
  std::vector<std::pair<const char*, PinnedBlockRecord*>> blocks;
  for (int i = 0; i < 3000; ++i) blocks.push_back(Add(256));
  for (const auto& [data, record] : blocks) {
    ASSERT_EQ(registry_.FindByContext(data, record), record);
    ASSERT_EQ(registry_.FindByAddress(data + 100), record);
  }
  for (const auto& [_, record] : blocks) registry_.Remove(*record);
}

TEST_F(PinnedBlockRegistryTest, RecordsThatOneThreadRemovesServeTheOneThatAdds) {
  std::set<PinnedBlockRecord*> records;
  for (int round = 0; round < 50; ++round) {
    std::vector<PinnedBlockRecord*> blocks;
    for (int i = 0; i < 200; ++i) blocks.push_back(Add(256).second);
    records.insert(blocks.begin(), blocks.end());
    std::thread([&] {
      for (PinnedBlockRecord* record : blocks) registry_.Remove(*record);
    }).join();
  }
  EXPECT_LE(records.size(), 1000u);
}

TEST_F(PinnedBlockRegistryTest, CountsAreExactWhoeverRemoves) {
  std::vector<PinnedBlockRecord*> blocks;
  for (int i = 0; i < 10; ++i) blocks.push_back(Add(40000).second);
  const int64_t each = 40 * 1024;
  EXPECT_EQ(registry_.GetStats().requests.current, 10);
  EXPECT_EQ(registry_.GetStats().bytes.current, 10 * each);
  std::thread([&] {
    for (int i = 0; i < 4; ++i) registry_.Remove(*blocks[i]);
  }).join();
  for (int i = 4; i < 7; ++i) registry_.Remove(*blocks[i]);
  PinnedBlockRegistry::Stats stats = registry_.GetStats();
  EXPECT_EQ(stats.requests.allocated, 10);
  EXPECT_EQ(stats.requests.freed, 7);
  EXPECT_EQ(stats.requests.current, 3);
  EXPECT_EQ(stats.requests.peak, 10);
  EXPECT_EQ(stats.bytes.current, 3 * each);
  EXPECT_EQ(stats.bytes.peak, 10 * each);
  registry_.ResetPeaks();
  registry_.ResetAccumulated();
  registry_.Remove(*blocks[7]);
  stats = registry_.GetStats();
  EXPECT_EQ(stats.requests.peak, 3);
  EXPECT_EQ(stats.bytes.peak, 3 * each);
  EXPECT_EQ(stats.requests.allocated, 0);
  EXPECT_EQ(stats.requests.freed, 1);
  EXPECT_EQ(stats.requests.current, 2);
  for (int i = 8; i < 10; ++i) registry_.Remove(*blocks[i]);
}

// Threads beyond the number of slots share a list.
TEST_F(PinnedBlockRegistryTest, AnyNumberOfThreadsMayAddAndFindAndRemove) {
  constexpr int kThreads = kThreadSlots + 6;
  std::atomic<int> lost = 0;
  std::atomic<int> waiting = 0;
  RunThreads(kThreads, [&](int) {
    ThreadSlot();
    for (++waiting; waiting < kThreads;) std::this_thread::yield();
    const auto [mine, record] = Add(1000);
    for (int i = 0; i < 50; ++i) {
      const auto [data, other] = Add(256);
      if (registry_.FindByContext(data, other) != other) ++lost;
      if (registry_.FindByAddress(mine + 500) != record) ++lost;
      registry_.Remove(*other);
    }
    registry_.Remove(*record);
  });
  EXPECT_EQ(lost, 0);
  EXPECT_EQ(registry_.GetStats().requests.current, 0);
  EXPECT_EQ(registry_.GetStats().requests.allocated, kThreads * 51);
}

}  // namespace
}  // namespace pinion
