// Many threads at once. ThreadSanitizer checks for races, stamps in the blocks for mixed-up bytes.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/allocator_stats.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/allocator/sources/mmap_source.h"
#include "pinion/tests/support/allocator_invariants.h"
#include "pinion/tests/support/fake_host.h"
#include "pinion/tests/support/fake_source.h"
#include "pinion/tests/support/fake_timeline.h"
#include "pinion/tests/support/run_threads.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace {

using ::pinion::testing::CheckInvariants;
using ::pinion::testing::FakeHost;
using ::pinion::testing::FakeSource;
using ::pinion::testing::FakeTimeline;
using ::pinion::testing::IsOk;
using ::pinion::testing::RunThreads;

class PinnedAllocatorStressTest : public ::testing::Test {
 protected:
  PinnedAllocatorStressTest() {
    AllocatorOptions options;
    options.segment_bytes = kMiB;
    options.max_locked_bytes = 32 * kMiB;
    allocator_ = PinnedAllocator::Create(options, source_, host_.Probe()).value();
  }

  void ExpectCleanEnd() {
    EXPECT_THAT(CheckInvariants(allocator_->GetStats()), IsOk());
    EXPECT_EQ(allocator_->GetStats().booked_bytes.current, 0u);
    EXPECT_THAT(allocator_->Trim(0), IsOk());
    EXPECT_EQ(source_->outstanding_bytes(), 0u);
  }

  FakeHost host_;
  const std::shared_ptr<FakeSource> source_ = std::make_shared<FakeSource>();
  std::shared_ptr<PinnedAllocator> allocator_;
};

bool Holds(const PinnedBlock& block, unsigned char fill) {
  const auto* bytes = static_cast<const unsigned char*>(block.data());
  return std::all_of(bytes, bytes + block.size_bytes(),
                     [fill](unsigned char byte) { return byte == fill; });
}

TEST_F(PinnedAllocatorStressTest, ThreadsThatDoEverythingAtOnceKeepTheirBytes) {
  std::atomic<int> damaged{0};
  RunThreads(4, [&](int thread) {
    std::mt19937_64 random(thread + 1);
    const auto timeline = std::make_shared<FakeTimeline>();
    const auto fill = static_cast<unsigned char>(thread + 1);
    std::vector<PinnedBlock> blocks;
    for (uint64_t step = 1; step <= 1500; ++step) {
      const uint64_t choice = random() % 100;
      if (choice < 50) {
        absl::StatusOr<PinnedBlock> block =
            allocator_->Allocate(1 + random() % (random() % 4 == 0 ? 256 * kKiB : 8 * kKiB));
        if (!block.ok()) continue;
        std::memset(block->data(), fill, block->size_bytes());
        blocks.push_back(*std::move(block));
      } else if (choice < 95) {
        if (blocks.empty()) continue;
        std::swap(blocks[random() % blocks.size()], blocks.back());
        if (!Holds(blocks.back(), fill)) ++damaged;
        if (choice < 75) std::move(blocks.back()).ReleaseAfter({timeline->Ticket(step)});
        blocks.pop_back();
      } else if (choice < 98) {
        timeline->CompleteOnDevice(step);
      } else {
        (void)allocator_->Trim(8 * kMiB);
        (void)allocator_->GetStats();
      }
    }
    timeline->CompleteOnDevice(UINT64_MAX);
  });
  EXPECT_EQ(damaged, 0);
  ExpectCleanEnd();
}

// As with autograd: the forward thread packs, the backward thread releases with the copy's ticket.
TEST_F(PinnedAllocatorStressTest, BlocksThatOneThreadMakesAreReleasedByAnotherWithTickets) {
  constexpr uint64_t kBlocks = 3000;
  const auto timeline = std::make_shared<FakeTimeline>();
  Mutex mu;
  CondVar changed;
  std::deque<PinnedBlock> queue;
  std::atomic<int> damaged{0};
  RunThreads(2, [&](int thread) {
    for (uint64_t i = 1; i <= kBlocks; ++i) {
      if (thread == 0) {
        absl::StatusOr<PinnedBlock> block = allocator_->Allocate(4 * kKiB + i % 7 * kKiB);
        ASSERT_THAT(block, IsOk());
        std::memset(block->data(), static_cast<int>(i % 251), block->size_bytes());
        MutexLock lock(mu);
        while (queue.size() >= 64) changed.Wait(mu);
        queue.push_back(*std::move(block));
        changed.NotifyAll();
      } else {
        PinnedBlock block;
        {
          MutexLock lock(mu);
          while (queue.empty()) changed.Wait(mu);
          block = std::move(queue.front());
          queue.pop_front();
          changed.NotifyAll();
        }
        if (!Holds(block, static_cast<unsigned char>(i % 251))) ++damaged;
        std::move(block).ReleaseAfter({timeline->Ticket(i)});
        if (i % 16 == 0) timeline->CompleteOnDevice(i);
      }
    }
  });
  EXPECT_EQ(damaged, 0);
  timeline->CompleteOnDevice(kBlocks);
  ExpectCleanEnd();
}

// Segments merge and split while blocks in them are queried.
TEST_F(PinnedAllocatorStressTest, ABlockCanBeAskedWhileOthersGrowAndTrim) {
  AllocatorOptions options;
  options.segment_bytes = 2 * kMiB;
  allocator_ =
      PinnedAllocator::Create(options, MmapSource::Create().value(), host_.Probe()).value();
  std::atomic<bool> done{false};
  RunThreads(2, [&](int thread) {
    if (thread == 0) {
      const PinnedBlock block = allocator_->Allocate(kMiB).value();
      while (!done) {
        EXPECT_GE(block.numa_node(), -1);
        EXPECT_GE(block.capacity_bytes(), kMiB);
      }
    } else {
      for (int round = 0; round < 100; ++round) {
        std::vector<PinnedBlock> blocks;
        for (int i = 0; i < 4; ++i) blocks.push_back(allocator_->Allocate(2 * kMiB - 256).value());
        std::swap(blocks[round % 4], blocks.back());
        blocks.resize(2);
        EXPECT_THAT(allocator_->Trim(0), IsOk());
      }
      done = true;
    }
  });
  ExpectCleanEnd();
}

TEST_F(PinnedAllocatorStressTest, ThreadsThatGrowTogetherStayUnderTheLimit) {
  std::atomic<uint64_t> failures{0};
  std::vector<std::vector<PinnedBlock>> blocks(8);
  RunThreads(8, [&](int thread) {
    for (int i = 0; i < 10; ++i) {
      absl::StatusOr<PinnedBlock> block = allocator_->Allocate(900 * kKiB);
      if (block.ok()) {
        blocks[thread].push_back(*std::move(block));
      } else {
        ++failures;
      }
    }
  });
  const AllocatorStats stats = allocator_->GetStats();
  EXPECT_LE(stats.locked_bytes.peak, 32 * kMiB);
  EXPECT_EQ(stats.limit_refusals, failures);
  EXPECT_GT(failures, 0u);
  blocks.clear();
  ExpectCleanEnd();
}

TEST_F(PinnedAllocatorStressTest, TheAllocatorGoesWhileThreadsReleaseItsLastBlocks) {
  for (int round = 0; round < 50; ++round) {
    AllocatorOptions options;
    options.segment_bytes = kMiB;
    std::shared_ptr<PinnedAllocator> allocator =
        PinnedAllocator::Create(options, source_, host_.Probe()).value();
    std::vector<std::optional<PinnedBlock>> blocks(3);
    for (auto& block : blocks) block = allocator->Allocate(100 * kKiB).value();
    RunThreads(4, [&](int thread) {
      if (thread == 3) {
        allocator.reset();
      } else {
        blocks[thread].reset();
      }
    });
    ASSERT_EQ(source_->outstanding_bytes(), 0u);
  }
}

}  // namespace
}  // namespace pinion
