// Behavior when the C++ heap has no memory for the allocator's bookkeeping: no block is lost and no
// block is reused too early.

#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/allocator_stats.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/fence.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/allocator/sources/mmap_source.h"
#include "pinion/tests/allocator/pinned_allocator_fixture.h"
#include "pinion/tests/support/allocator_invariants.h"
#include "pinion/tests/support/child_process.h"
#include "pinion/tests/support/fake_timeline.h"
#include "pinion/tests/support/full_heap.h"
#include "pinion/tests/support/status_matchers.h"
#include "pinion/tests/support/worker.h"

namespace pinion {
namespace {

using ::pinion::testing::CheckInvariants;
using ::pinion::testing::ChildProcess;
using ::pinion::testing::FakeTimeline;
using ::pinion::testing::FullHeap;
using ::pinion::testing::IsOk;
using ::pinion::testing::kSlack;
using ::pinion::testing::PinnedAllocatorFixture;
using ::pinion::testing::Worker;
using ::testing::AnyOf;

// More releases than the slab has cached batches left from other tests.
constexpr int kMany = 4000;

class OutOfMemoryTest : public PinnedAllocatorFixture {
 protected:
  std::vector<PinnedBlock> TakeSmall(int count) {
    std::vector<PinnedBlock> blocks;
    for (int i = 0; i < count; ++i) blocks.push_back(*allocator_->Allocate(256 - kSlack));
    return blocks;
  }
  static void ReleaseOnFullHeap(PinnedBlock block, absl::Span<const FenceTicket> tickets,
                                int64_t heap_lasts = 0) {
    const FullHeap full(heap_lasts);
    std::move(block).ReleaseAfter(tickets);
  }
  void ExpectAllIsFree() {
    EXPECT_THAT(CheckInvariants(Stats()), IsOk());
    EXPECT_EQ(Stats().used_bytes.current, 0u);
    EXPECT_EQ(Stats().cached_bytes.current, Stats().locked_bytes.current);
  }
};

TEST_F(OutOfMemoryTest, ABlockThatAnotherThreadReleasesComesBack) {
  Worker forward;
  std::vector<PinnedBlock> blocks;
  forward.Run([&] { blocks = TakeSmall(kMany); });
  {
    const FullHeap full;
    for (PinnedBlock& block : blocks) block = PinnedBlock();
  }
  EXPECT_GT(FullHeap::refusals(), 0u);
  ExpectAllIsFree();
}

TEST_F(OutOfMemoryTest, WhereATicketCannotBeNotedTheReleaseWaitsForIt) {
  std::vector<PinnedBlock> blocks = TakeSmall(kMany);
  timeline_->CompleteOnDevice(1);  // only a wait learns of it
  for (PinnedBlock& block : blocks) ReleaseOnFullHeap(std::move(block), {timeline_->Ticket(1)});
  EXPECT_EQ(timeline_->waits(), 1u) << "from then on it is known to be done";
  ASSERT_THAT(allocator_->Trim(0), IsOk());
  ExpectAllIsFree();
}

TEST_F(OutOfMemoryTest, ABlockWithSeveralTicketsWaitsForAllOfThem) {
  const auto other = std::make_shared<FakeTimeline>();
  timeline_->CompleteOnDevice(1);
  other->CompleteOnDevice(1);
  ReleaseOnFullHeap(Take(kMiB - kSlack), {timeline_->Ticket(1), other->Ticket(1)});
  EXPECT_EQ(timeline_->waits(), 1u);
  EXPECT_EQ(other->waits(), 1u);
  ExpectAllIsFree();
}

TEST_F(OutOfMemoryTest, WhereOnlyTheFirstTicketCanBeNotedNothingIsNotedTwice) {
  int refused_after_the_first = 0;
  for (int lasts = 1; lasts < 6; ++lasts) {
    Make();
    const auto timeline = std::make_shared<FakeTimeline>();
    const auto other = std::make_shared<FakeTimeline>();
    timeline->CompleteOnDevice(1);
    other->CompleteOnDevice(1);
    ReleaseOnFullHeap(Take(kMiB - kSlack),
                      {timeline->Ticket(1), other->Ticket(1), timeline->Ticket(1)}, lasts);
    if (FullHeap::refusals() > 0) ++refused_after_the_first;
    EXPECT_EQ(timeline->waits(), FullHeap::refusals() > 0 ? 1u : 0u);
    ASSERT_THAT(allocator_->Trim(0), IsOk());
    ExpectAllIsFree();
  }
  EXPECT_GT(refused_after_the_first, 0);
}

// Times out at once. The error message needs heap memory if `takes_memory` is set.
class NeverDone final : public FenceTimeline {
 public:
  explicit NeverDone(bool takes_memory) : takes_memory_(takes_memory) {}
  uint64_t Completed() const noexcept override { return 0; }
  void Poll() override {}
  absl::Status Wait(uint64_t, absl::Duration) override {
    return absl::DeadlineExceededError(takes_memory_ ? "a text that lies in the heap" : "");
  }

 private:
  const bool takes_memory_;
};

TEST_F(OutOfMemoryTest, WhereTheTicketIsNeverDoneTheBlockIsNeverUsedAgain) {
  for (const bool takes_memory : {false, true}) {
    ChildProcess child([&] {
      Make();
      ReleaseOnFullHeap(Take(3 * kMiB - kSlack), {{std::make_shared<NeverDone>(takes_memory), 1},
                                                  {std::make_shared<NeverDone>(takes_memory), 1}});
      EXPECT_EQ(Stats().used_bytes.current, 3 * kMiB);
      const uint64_t calls = source_->calls();
      Take(3 * kMiB - kSlack);
      EXPECT_EQ(source_->calls(), calls + 1);
    });
    EXPECT_EQ(child.Wait(), 0);
  }
}

// Another thread's releases arrive in batches. Nine waiting batches exceed the owner's limit.
class BatchesOutOfMemoryTest : public OutOfMemoryTest {
 protected:
  static constexpr int kBatches = 9;
  static constexpr int kReleases = kBatches * 16;

  void SetUp() override {
    TakeSmall(2 * kReleases);  // creates the records and slabs in advance
    blocks_ = TakeSmall(kReleases);
  }
  void ReleaseOnAnotherThread(int first, int count, uint64_t value) {
    backward_.Run([&] {
      for (int i = first; i < first + count; ++i) {
        const FenceTicket tickets[] = {timeline_->Ticket(value)};
        std::move(blocks_[i]).ReleaseAfter(tickets);
      }
    });
  }

  Worker backward_;
  std::vector<PinnedBlock> blocks_;
};

TEST_F(BatchesOutOfMemoryTest, WhatAnAllocationCannotNoteStaysInItsBatch) {
  ReleaseOnAnotherThread(0, kReleases, /*value=*/1);
  {
    const FullHeap full;
    for (int i = 0; i < 32; ++i) EXPECT_TRUE(allocator_->Allocate(256 - kSlack).ok());
  }
  EXPECT_GT(FullHeap::refusals(), 0u);
  EXPECT_EQ(Stats().deferred_bytes.total, kReleases * 256u);
  timeline_->CompleteVisibly(1);
  ASSERT_THAT(allocator_->Trim(0), IsOk());
  ExpectAllIsFree();
}

TEST_F(BatchesOutOfMemoryTest, WhatIsDoneServesThoughABatchBeforeItCannotBeNoted) {
  blocks_[16] = Take(3 * kMiB - kSlack);
  const void* const data = blocks_[16].data();
  ReleaseOnAnotherThread(0, 16, /*value=*/1);
  ReleaseOnAnotherThread(16, 16, /*value=*/0);
  {
    const FullHeap full;
    const absl::StatusOr<PinnedBlock> block = allocator_->Allocate(3 * kMiB - kSlack);
    EXPECT_TRUE(block.ok());
    EXPECT_EQ(block->data(), data);
  }
  EXPECT_GT(FullHeap::refusals(), 0u);
}

// Allocates `large` large blocks and 60 small ones with tickets while the heap lasts, then releases
// all. Returns whether every allocation succeeded.
bool RunWithHeap(PinnedAllocator& allocator, const FenceTicket& ticket, int large, int64_t lasts) {
  const int count = large + 60;
  std::vector<PinnedBlock> blocks;
  blocks.reserve(count);
  const FullHeap full(lasts);
  try {
    for (int i = 0; i < count; ++i) {
      absl::StatusOr<PinnedBlock> block =
          allocator.Allocate((i < large || (i - large) % 5 == 4 ? 32 * kKiB : 256) - kSlack);
      if (!block.ok()) return false;
      blocks.push_back(*std::move(block));
      if (i % 7 != 0) continue;
      std::move(blocks.back()).ReleaseAfter(absl::MakeConstSpan(&ticket, 1));
      blocks.pop_back();
    }
  } catch (const std::bad_alloc&) {
  }
  blocks.clear();
  return FullHeap::refusals() == 0;
}

class OutOfMemoryAtOnceTest : public OutOfMemoryTest, public ::testing::WithParamInterface<int> {};

TEST_P(OutOfMemoryAtOnceTest, AnAllocationThatThrowsHasLostNothing) {
  options_.segment_bytes = 6 * kMiB;
  bool got_through = false;
  int64_t lasts = 0;
  for (; !got_through; ++lasts) {
    ASSERT_LT(lasts, 1000);
    Make();
    ASSERT_THAT(allocator_->Reserve(6 * kMiB - kSlack), IsOk());
    const auto timeline = std::make_shared<FakeTimeline>();
    timeline->CompleteOnDevice(1);
    got_through = RunWithHeap(*allocator_, timeline->Ticket(1), GetParam(), lasts);
    timeline->CompleteVisibly(1);
    const uint64_t calls = source_->calls();
    {
      const PinnedBlock all = Take(6 * kMiB - kSlack);  // one free range
      EXPECT_EQ(source_->calls(), calls) << "after " << lasts << " allocations of the heap";
      const PinnedBlock small = Take(256 - kSlack);  // needs a new segment
      EXPECT_EQ(source_->calls(), calls + 1) << "after " << lasts << " allocations of the heap";
    }
    ExpectAllIsFree();
  }
  EXPECT_GT(lasts, 5);
}

// A chunk has 127 records. The values let a slab, or the first block in it, take the last record.
INSTANTIATE_TEST_SUITE_P(Blocks, OutOfMemoryAtOnceTest, ::testing::Values(0, 124, 125, 126),
                         ::testing::PrintToStringParamName());

// Addresses of a lost segment are not handed out again.
TEST(MmapSourceOutOfMemoryTest, ASegmentWhoseAllocationThrowsIsUnmapped) {
  const auto source = MmapSource::Create().value();
  void* const data = source->Allocate(2 * kMiB).value().data;
  ASSERT_THAT(source->Free({data, 2 * kMiB}), IsOk());
  int64_t lasts = 0;
  do {
    ASSERT_LT(lasts, 100);
    try {
      const FullHeap full(lasts++);
      EXPECT_TRUE(source->Allocate(2 * kMiB).ok());
    } catch (const std::bad_alloc&) {
      EXPECT_EQ(source->Allocate(2 * kMiB).value().data, data) << "after " << lasts - 1;
    }
    ASSERT_THAT(source->Free({data, 2 * kMiB}), IsOk());
  } while (FullHeap::refusals() > 0);
  EXPECT_GT(lasts, 3);
}

// Runs one growth per child process. In each child another heap allocation is the first to fail,
// and the process may abort.
class GrowthOutOfMemoryTest : public OutOfMemoryTest {
 protected:
  // `expect` gets whether Allocate served the request; false if it threw.
  void GrowInChildren(FullHeap::Fails fails, const std::function<void(bool served)>& expect) {
    constexpr int kGotThrough = 2;
    int outcome = 0;
    for (int64_t lasts = 0; outcome != kGotThrough; ++lasts) {
      ChildProcess child([&] {
        Make();
        bool served = false;
        {
          const FullHeap full(lasts, fails);
          try {
            served = allocator_->Allocate(kMiB - kSlack).ok();
          } catch (const std::bad_alloc&) {
          }
        }
        expect(served);
        if (FullHeap::refusals() == 0) _exit(kGotThrough);
      });
      outcome = child.Wait();
      ASSERT_THAT(outcome, AnyOf(0, kGotThrough, -SIGABRT)) << lasts;
      if (outcome == 0) ++went_on_;
      if (outcome == -SIGABRT) ++ended_;
    }
  }

  int went_on_ = 0;
  int ended_ = 0;
};

TEST_F(GrowthOutOfMemoryTest, AGrowthHasLostNothingOrEndsTheProcess) {
  GrowInChildren(FullHeap::Fails::kAll, [this](bool) {
    Take(4 * kMiB - kSlack);
    ExpectAllIsFree();
  });
  EXPECT_GT(went_on_, 5);
  EXPECT_GT(ended_, 0);
}

// Limit files that cannot be read for lack of memory must not count as "no limit".
TEST_F(GrowthOutOfMemoryTest, TheBudgetHolds) {
  SetAvailableRam(5 * kGiB);
  host_.Write("proc/self/cgroup", "0::/pod\n");
  host_.Write("cgroup/pod/memory.max", "max\n");
  GrowInChildren(FullHeap::Fails::kOne, [](bool served) { EXPECT_FALSE(served); });
  EXPECT_GT(went_on_, 20);
}

}  // namespace
}  // namespace pinion
