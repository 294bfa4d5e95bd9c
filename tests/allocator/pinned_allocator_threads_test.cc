// Each thread allocates from its own arena. The arenas must not make the allocator pin or refuse
// while another thread's arena has free memory.

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstdint>
#include <functional>
#include <latch>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/allocator_stats.h"
#include "pinion/allocator/base/biased_mutex.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/thread_slot.h"
#include "pinion/allocator/fence.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/allocator/sources/mmap_source.h"
#include "pinion/tests/allocator/pinned_allocator_fixture.h"
#include "pinion/tests/support/allocator_invariants.h"
#include "pinion/tests/support/fake_host.h"
#include "pinion/tests/support/fake_source.h"
#include "pinion/tests/support/fake_timeline.h"
#include "pinion/tests/support/forbid_barriers.h"
#include "pinion/tests/support/run_threads.h"
#include "pinion/tests/support/source_adaptor.h"
#include "pinion/tests/support/status_matchers.h"
#include "pinion/tests/support/status_says.h"
#include "pinion/tests/support/worker.h"

namespace pinion {
namespace {

using ::pinion::testing::CheckInvariants;
using ::pinion::testing::FakeHost;
using ::pinion::testing::FakeSource;
using ::pinion::testing::FakeTimeline;
using ::pinion::testing::ForbidBarriers;
using ::pinion::testing::IsExhausted;
using ::pinion::testing::IsOk;
using ::pinion::testing::kSlack;
using ::pinion::testing::MayForbidBarriers;
using ::pinion::testing::RunThreads;
using ::pinion::testing::Worker;
using ::testing::ElementsAre;

class PinnedAllocatorThreadsTest : public ::pinion::testing::PinnedAllocatorFixture {
 protected:
  // One segment, which is all that may be locked.
  void MakeSegmentOf(uint64_t size_bytes) {
    options_.segment_bytes = size_bytes;
    MakeWithLimit(size_bytes);
    EXPECT_THAT(allocator_->Reserve(size_bytes), IsOk());
  }

  void ReleaseElsewhere(std::vector<PinnedBlock> blocks, const FenceTicket& ticket) {
    OnAnotherThread([&] {
      for (PinnedBlock& block : blocks) std::move(block).ReleaseAfter({ticket});
    });
  }

  uint64_t pin_calls() const { return source_->calls(); }

  static int64_t Distance(const PinnedBlock& from, const PinnedBlock& to) {
    return static_cast<const char*>(to.data()) - static_cast<const char*>(from.data());
  }
};

TEST_F(PinnedAllocatorThreadsTest, WhatOneThreadHasFreedServesAnotherBeforeAnythingIsPinned) {
  Take(3 * kMiB - kSlack);
  OnAnotherThread([&] { Take(3 * kMiB - kSlack); });
  Take(3 * kMiB - kSlack);
  EXPECT_EQ(pin_calls(), 1u);
}

TEST_F(PinnedAllocatorThreadsTest, FreeNeighboursOfTwoThreadsJoinBeforeAnythingIsPinned) {
  {
    const PinnedBlock mine = Take(kMiB - kSlack);
    OnAnotherThread([&] { Take(kMiB - kSlack); });
  }
  EXPECT_EQ(pin_calls(), 1u);
  Take(4 * kMiB - kSlack);  // needs the whole segment, which both arenas share
  EXPECT_EQ(pin_calls(), 1u);
}

TEST_F(PinnedAllocatorThreadsTest, AHoleBesideAnotherThreadsBlocksIsFilledBeforeAnythingIsPinned) {
  std::vector<PinnedBlock> blocks = TakeMany(4, kMiB - kSlack);
  const void* const hole = blocks[1].data();
  blocks[1] = PinnedBlock();
  OnAnotherThread([&] { EXPECT_EQ(Take(kMiB - kSlack).data(), hole); });
  // The hole still belongs to this thread's arena, although the other thread released it.
  EXPECT_EQ(Take(kMiB - kSlack).data(), hole);
  EXPECT_EQ(pin_calls(), 1u);
}

TEST_F(PinnedAllocatorThreadsTest, AHoleWithWholePiecesInItServesAnotherThreadAtItsFullLength) {
  MakeSegmentOf(8 * kMiB);
  const PinnedBlock low = Take(kMiB - kSlack);
  PinnedBlock middle = Take(4 * kMiB - kSlack);
  const PinnedBlock high = Take(3 * kMiB - kSlack);
  const void* const hole = middle.data();
  middle = PinnedBlock();
  OnAnotherThread([&] { EXPECT_EQ(Take(4 * kMiB - kSlack).data(), hole); });
  EXPECT_EQ(Take(4 * kMiB - kSlack).data(), hole);
}

TEST_F(PinnedAllocatorThreadsTest, AHoleThatGoesOnInAnotherThreadsMemoryIsOneHole) {
  MakeSegmentOf(8 * kMiB);
  PinnedBlock mine = Take(kMiB - kSlack);
  const void* const begin = mine.data();
  PinnedBlock first;
  PinnedBlock rest;
  OnAnotherThread([&] {
    Take(4 * kMiB - kSlack);
    first = Take(kMiB - kSlack);
    rest = Take(3 * kMiB - kSlack);
  });
  ASSERT_EQ(Distance(mine, first), 4 * kMiB) << "half of the pieces are the other thread's";
  first = PinnedBlock();
  EXPECT_EQ(Distance(mine, Take(4 * kMiB - kSlack)), kMiB);
  rest = PinnedBlock();
  mine = PinnedBlock();
  EXPECT_EQ(Take(8 * kMiB - kSlack).data(), begin);
}

// A thread that misses again takes more of the other arena, in pieces of 2 MiB from the upper end.
TEST_F(PinnedAllocatorThreadsTest, AThreadTakesAsMuchOfAnothersMemoryAsItHas) {
  MakeSegmentOf(16 * kMiB);
  const PinnedBlock mine = Take(2 * kMiB - kSlack);
  std::vector<int64_t> offsets;
  OnAnotherThread([&] {
    const std::vector<PinnedBlock> theirs = TakeMany(3, 2 * kMiB - kSlack);
    for (const PinnedBlock& block : theirs) offsets.push_back(Distance(mine, block));
  });
  // The thread took one piece, then one, then two and used the lower of them.
  EXPECT_THAT(offsets, ElementsAre(14 * kMiB, 12 * kMiB, 8 * kMiB));
}

// Without the barrier, Trim might not see that the owner is inside its arena. Does without the
// fixture: a child that dies would leave the fixture's files behind.
TEST(PinnedAllocatorThreadsDeathTest, WhoLooksAtAllArenasRunsABarrier) {
  if (BiasedMutex::BestBarrier() == BiasedMutex::Barrier::kNone || !MayForbidBarriers()) {
    GTEST_SKIP() << "no membarrier(2), or no seccomp(2)";
  }
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto allocator =
      PinnedAllocator::Create({}, std::make_shared<FakeSource>(), FakeHost().Probe()).value();
  EXPECT_DEATH(
      {
        PinnedBlock theirs;
        std::thread([&] { theirs = allocator->Allocate(kKiB).value(); }).join();
        ForbidBarriers();
        (void)allocator->Trim(0);
      },
      "let the seccomp filter pass it");
}

// Only the owner of an arena enters releases in it.
TEST_F(PinnedAllocatorThreadsTest, WhatAnotherThreadReleasesIsEnteredByTheOneThatHasTheArena) {
  PinnedBlock first = allocator_->Allocate(64 * kKiB - kSlack).value();
  const PinnedBlock next = allocator_->Allocate(64 * kKiB - kSlack).value();
  const void* const data = first.data();
  OnAnotherThread([&] { first = PinnedBlock(); });
  EXPECT_NE(allocator_->Allocate(64 * kKiB - kSlack)->data(), data) << "still in its buffer";
  (void)Stats();  // enters all releases
  EXPECT_EQ(allocator_->Allocate(64 * kKiB - kSlack)->data(), data);
}

// docs/users/limits.md
TEST_F(PinnedAllocatorThreadsTest, NearALimitBlocksOfTwoThreadsLeaveTwoHoles) {
  MakeSegmentOf(8 * kMiB);
  const PinnedBlock mine = Take(kMiB - kSlack);
  {
    const PinnedBlock beside_it = Take(kMiB - kSlack);
    EXPECT_THAT(allocator_->Allocate(6 * kMiB - kSlack), IsOk());
  }
  PinnedBlock theirs;
  OnAnotherThread([&] { theirs = Take(kMiB - kSlack); });
  EXPECT_EQ(Distance(mine, theirs), 6 * kMiB);
  EXPECT_THAT(allocator_->Allocate(6 * kMiB - kSlack), IsExhausted());
  EXPECT_THAT(allocator_->Allocate(5 * kMiB - kSlack), IsOk());
}

// Mapped memory with adjacent segments. Runs an action at the first call of JoinsAt: the search for
// a hole that spans arenas calls JoinsAt without holding an arena's lock.
class ActingSource final : public ::pinion::testing::SourceAdaptor {
 public:
  ActingSource() : SourceAdaptor(MmapSource::Create({.touch_threads = 0}).value()) {}

  void set_act(std::function<void()> act) { act_ = std::move(act); }
  int segments() const { return segments_; }

  bool JoinsAt(const void* border) const override {
    if (const std::function<void()> act = std::exchange(act_, nullptr); act != nullptr) act();
    return SourceAdaptor::JoinsAt(border);
  }
  absl::StatusOr<HostSegment> Allocate(uint64_t size_bytes) override {
    ++segments_;
    return SourceAdaptor::Allocate(size_bytes);
  }

 private:
  mutable std::function<void()> act_;
  int segments_ = 0;
};

//   segment     0       1       2       3
//   of     mine   theirs  mine   theirs
//   used   |xxx |  |xxx|xx  |   |  xx|      holes of 2 MiB and of 3 MiB, each in two arenas
class HolesOfTwoThreadsTest : public PinnedAllocatorThreadsTest {
 protected:
  void SetUp() override {
    options_.max_locked_bytes = 16 * kMiB;
    MakeOver(acting_source_);
    PinnedBlock segments[4];
    for (int i = 0; i < 4; ++i) {
      const auto take = [&, i] { segments[i] = Take(4 * kMiB - kSlack); };
      i % 2 == 0 ? take() : other_.Run(take);
      ASSERT_EQ(acting_source_->segments(), i + 1);
    }
    begin_ = static_cast<char*>(segments[0].data());
    segments[0] = PinnedBlock();
    used_[0] = Take(3 * kMiB - kSlack);
    segments[2] = PinnedBlock();
    used_[2] = Take(5 * kMiB / 2 - kSlack);
    other_.Run([&] {
      segments[1] = PinnedBlock();
      PinnedBlock hole = Take(kMiB - kSlack);
      used_[1] = Take(3 * kMiB - kSlack);
      segments[3] = PinnedBlock();
      PinnedBlock larger_hole = Take(3 * kMiB / 2 - kSlack);
      used_[3] = Take(5 * kMiB / 2 - kSlack);
      hole = PinnedBlock();
      larger_hole = PinnedBlock();
    });
  }

  const std::shared_ptr<ActingSource> acting_source_ = std::make_shared<ActingSource>();
  Worker other_;
  PinnedBlock used_[4];
  const char* begin_ = nullptr;
};

TEST_F(HolesOfTwoThreadsTest, TheSmallestThatIsLargeEnoughIsTaken) {
  EXPECT_EQ(Take(2 * kMiB - kSlack).data(), begin_ + 3 * kMiB);
  const PinnedBlock large = Take(5 * kMiB / 2 - kSlack);
  EXPECT_EQ(large.data(), begin_ + 21 * kMiB / 2);
  EXPECT_EQ(Take(2 * kMiB - kSlack).data(), begin_ + 3 * kMiB);
}

TEST_F(HolesOfTwoThreadsTest, WhereItsOwnerFillsTheOneThatWasFoundAnotherOneIsTaken) {
  PinnedBlock filled;
  acting_source_->set_act(
      [&] { other_.Run([&] { filled = allocator_->Allocate(kMiB - kSlack).value(); }); });
  const absl::StatusOr<PinnedBlock> block = allocator_->Allocate(2 * kMiB - kSlack);
  ASSERT_THAT(block, IsOk());
  EXPECT_EQ(filled.data(), begin_ + 4 * kMiB);
  EXPECT_EQ(block->data(), begin_ + 21 * kMiB / 2);
  EXPECT_EQ(Stats().polled_hits, 0u) << "nor was it missed";
}

// Trim removes all free pieces for a moment; an allocation in that moment must still succeed.
TEST_F(PinnedAllocatorThreadsTest, WhatTrimPutsBackServesWhoMissedItMeanwhile) {
  MakeSegmentOf(16 * kMiB);
  const PinnedBlock keeps_the_segment = Take(2 * kMiB - kSlack);  // one piece of it
  constexpr int kTrims = 4000;
  std::atomic<int> trims = 0;
  std::vector<std::thread> trimming;
  for (int i = 0; i < 2; ++i) {
    trimming.emplace_back([&] {
      while (trims++ < kTrims) EXPECT_THAT(allocator_->Trim(0), IsOk());
    });
  }
  while (trims < kTrims) EXPECT_THAT(allocator_->Allocate(64 * kKiB), IsOk());
  for (std::thread& thread : trimming) thread.join();
  EXPECT_EQ(Stats().polled_hits, 0u);
  EXPECT_EQ(Stats().booked_bytes.current, 2 * kMiB);
}

TEST_F(PinnedAllocatorThreadsTest, ASmallBlockIsFoundInAnothersSlabWhereNothingElseIsLeft) {
  MakeWithLimit(4 * kMiB);
  const PinnedBlock small = Take(300);
  std::vector<PinnedBlock> rest;
  while (true) {
    absl::StatusOr<PinnedBlock> block = allocator_->Allocate(64 * kKiB - kSlack);
    if (!block.ok()) break;
    rest.push_back(*std::move(block));
  }
  EXPECT_GT(rest.size(), 50u);
  OnAnotherThread([&] { EXPECT_THAT(allocator_->Allocate(300), IsOk()); });
}

// As many adjacent blocks as a batch of releases holds, so that their release hands it over.
class ABatchOfBlocksTest : public PinnedAllocatorThreadsTest {
 protected:
  static constexpr uint64_t kSizeBytes = 64 * kKiB - kSlack;

  ABatchOfBlocksTest() : blocks_(TakeMany(16, kSizeBytes)), next_(Take(kSizeBytes)) {}

  // Returns whether one of `allocations` allocations reuses their memory.
  bool ServesOneOf(int allocations) {
    for (int i = 0; i < allocations; ++i) {
      const PinnedBlock block = allocator_->Allocate(kSizeBytes).value();
      if (begin_ <= block.data() && block.data() < next_.data()) return true;
    }
    return false;
  }

  std::vector<PinnedBlock> blocks_;
  const PinnedBlock next_;  // separates them from the remaining memory
  const void* const begin_ = blocks_.front().data();
};

TEST_F(ABatchOfBlocksTest, ThatAnotherThreadReleasesServesTheNextAllocations) {
  for (int i = 0; i < 10; ++i) Take(kSizeBytes);
  OnAnotherThread([&] { blocks_.clear(); });
  EXPECT_TRUE(ServesOneOf(4));
}

TEST_F(ABatchOfBlocksTest, ThatAnotherThreadReleasedServesSoonAfterItsTicketIsDone) {
  ReleaseElsewhere(std::move(blocks_), timeline_->Ticket(1));
  EXPECT_FALSE(ServesOneOf(16));
  timeline_->CompleteVisibly(1);
  EXPECT_TRUE(ServesOneOf(16));
}

// Deferring costs more than finding the ticket done. Neither a periodic check, nor a miss, nor many
// waiting batches may defer such a block.
TEST_F(PinnedAllocatorThreadsTest, WhatAnotherThreadReleasedIsNotDeferredIfItIsDoneWhenItIsNeeded) {
  ReleaseElsewhere(TakeMany(9 * 16, 16 * kKiB - kSlack), timeline_->Ticket(1));
  timeline_->CompleteVisibly(1);
  const PinnedBlock block = allocator_->Allocate(16 * kKiB - kSlack).value();
  EXPECT_EQ(Stats().deferred_bytes.total, 0u);
}

TEST_F(PinnedAllocatorThreadsTest, WhatWaitsForALittleIsNotDeferred) {
  ReleaseElsewhere(TakeMany(16, 16 * kKiB - kSlack), timeline_->Ticket(1));
  for (int i = 0; i < 400; ++i) (void)allocator_->Allocate(kKiB);  // includes a periodic check
  timeline_->CompleteVisibly(1);
  EXPECT_EQ(Stats().deferred_bytes.total, 0u);
}

TEST_F(PinnedAllocatorThreadsTest, WhatIsReleasedBehindATimelineThatIsStuckDoesNotWaitForLong) {
  auto done = std::make_shared<FakeTimeline>();
  const std::weak_ptr<FakeTimeline> watch = done;
  std::vector<PinnedBlock> blocks = TakeMany(32, 16 * kKiB - kSlack);
  OnAnotherThread([&] {
    for (int i = 0; i < 32; ++i) {
      std::move(blocks[i]).ReleaseAfter({i < 16 ? timeline_->Ticket(1) : done->Ticket(1)});
    }
  });
  done->CompleteVisibly(1);
  done.reset();
  for (int i = 0; i < 1000; ++i) (void)allocator_->Allocate(kKiB);
  EXPECT_TRUE(watch.expired());
}

// Calls no GetStats in between, because GetStats would enter all releases.
TEST_F(PinnedAllocatorThreadsTest, ABlockWhoseTicketIsDoneServesAnyThreadWhereverItWasReleased) {
  PinnedBlock block = Take(4 * kMiB - kSlack);
  const void* const data = block.data();
  OnAnotherThread([&] { std::move(block).ReleaseAfter({timeline_->Ticket(1)}); });
  timeline_->CompleteVisibly(1);
  OnAnotherThread([&] { EXPECT_EQ(Take(4 * kMiB - kSlack).data(), data); });
  EXPECT_EQ(pin_calls(), 1u);
}

TEST_F(PinnedAllocatorThreadsTest, ABlockWithTwoTicketsReleasedElsewhereWaitsForBoth) {
  const auto second = std::make_shared<FakeTimeline>();
  for (const auto& [done_first, done_last] : {std::pair(timeline_, second), {second, timeline_}}) {
    PinnedBlock block = Take(4 * kMiB - kSlack);
    const uint64_t ticket = done_last->Completed() + 1;
    OnAnotherThread([&] {
      std::move(block).ReleaseAfter({timeline_->Ticket(ticket), second->Ticket(ticket)});
    });
    done_first->CompleteVisibly(ticket);
    EXPECT_EQ(Stats().deferred_bytes.current, 4 * kMiB);
    done_last->CompleteVisibly(ticket);
    Take(4 * kMiB - kSlack);
    EXPECT_EQ(pin_calls(), 1u);
  }
}

TEST_F(PinnedAllocatorThreadsTest, ThreadsThatEndLeaveNothingBehind) {
  for (int i = 0; i < 3 * kThreadSlots; ++i) OnAnotherThread([&] { Take(3 * kMiB - kSlack); });
  EXPECT_EQ(pin_calls(), 1u);
  EXPECT_THAT(allocator_->Trim(0), IsOk());
  EXPECT_EQ(source_->outstanding_bytes(), 0u);
}

// Slots are scarce and reserved for threads that allocate.
TEST_F(PinnedAllocatorThreadsTest, AThreadThatOnlyReleasesTakesNoNumber) {
  std::vector<PinnedBlock> blocks = TakeMany(40, 300);  // more than one batch
  OnAnotherThread([&] {
    for (PinnedBlock& block : blocks) std::move(block).ReleaseAfter({timeline_->Ticket(1)});
    EXPECT_EQ(ThreadSlotIfAny(), kNoThreadSlot);
  });
}

TEST_F(PinnedAllocatorThreadsTest, ThreadsWithoutANumberShareWhatIsLeft) {
  constexpr int kThreads = kThreadSlots + 12;
  std::vector<PinnedBlock> blocks(kThreads);
  std::barrier all_have_one(kThreads);
  RunThreads(kThreads, [&](int thread) {
    blocks[thread] = Take(64 * kKiB - kSlack);
    all_have_one.arrive_and_wait();
    const PinnedBlock another = Take(32 * kKiB - kSlack);
  });
  EXPECT_EQ(Stats().booked_bytes.current, kThreads * 64 * kKiB);
  blocks.clear();
  EXPECT_EQ(Stats().booked_bytes.current, 0u);
  EXPECT_THAT(CheckInvariants(Stats()), IsOk());
}

// Several threads create the shared arena at once, and only one arena may be installed.
TEST_F(PinnedAllocatorThreadsTest, ThreadsWithoutANumberThatComeAtOnceShareOneArena) {
  const auto source = std::make_shared<ActingSource>();
  MakeOver(source);
  const PinnedBlock first = Take(4 * kMiB - kSlack);
  std::latch all_have_one(kThreadSlots + 1);
  std::latch end(1);
  std::vector<std::thread> with_number;
  for (int i = 0; i < kThreadSlots; ++i) {
    with_number.emplace_back([&] {
      ThreadSlot();
      all_have_one.count_down();
      end.wait();
    });
  }
  all_have_one.arrive_and_wait();
  std::vector<std::thread> without_number;
  PinnedBlock blocks[3];
  // Runs under the pool's lock, which a thread needs to install an arena.
  source->set_act([&] {
    for (PinnedBlock& block : blocks) {
      without_number.emplace_back([&] {
        block = allocator_->Allocate(kMiB - kSlack).value();
        EXPECT_EQ(ThreadSlot(), kNoThreadSlot);
      });
    }
    absl::SleepFor(absl::Milliseconds(20));
  });
  const PinnedBlock second = Take(4 * kMiB - kSlack);
  for (std::thread& thread : without_number) thread.join();
  EXPECT_EQ(source->segments(), 3);
  EXPECT_EQ(Stats().booked_bytes.current, 11 * kMiB);
  end.count_down();
  for (std::thread& thread : with_number) thread.join();
}

// Forward allocates the memory that backward releases, and vice versa. GetStats is not called in
// between, because it would enter all releases.
class TwoThreadsThatDrainEachOtherTest : public PinnedAllocatorThreadsTest {
 protected:
  // The limit is 2 MiB above the peak of 30 MiB, which fragmentation alone needs. Free memory or
  // unentered releases that one thread kept from the other would cause a refusal.
  static constexpr uint64_t kLimitBytes = 32 * kMiB;
  static constexpr uint64_t kSteps = 50;

  void Add(uint64_t size_bytes, std::vector<PinnedBlock>* blocks) {
    absl::StatusOr<PinnedBlock> block = allocator_->Allocate(size_bytes);
    ASSERT_THAT(block, IsOk());
    held_bytes_ += block->capacity_bytes();
    peak_bytes_ = std::max(peak_bytes_, held_bytes_);
    blocks->push_back(*std::move(block));
  }

  // The bytes count as held until Complete.
  void ReleaseLast(std::vector<PinnedBlock>* blocks) {
    waiting_bytes_ += blocks->back().capacity_bytes();
    std::move(blocks->back()).ReleaseAfter({timeline_->Ticket(next_ticket_)});
    blocks->pop_back();
  }
  void Complete() {
    timeline_->CompleteVisibly(next_ticket_++);
    held_bytes_ -= std::exchange(waiting_bytes_, 0);
  }

  // The numbers of releases are no multiples of the batch size 16, so some stay buffered.
  void RunStep(uint64_t step) {
    for (uint64_t i = 0; i < 30; ++i) {
      if (!gradients_.empty()) ReleaseLast(&gradients_);
      Add((1 + (i + step) % 7) * 200 * kKiB, &saved_);
    }
    ASSERT_TRUE(gradients_.empty());
    Complete();
    backward_.Run([&] {
      while (!saved_.empty()) {
        ReleaseLast(&saved_);
        if (saved_.size() % 2 == 0) Add(300 * kKiB, &gradients_);
      }
    });
    Complete();
  }

  Worker backward_;
  std::vector<PinnedBlock> saved_;
  std::vector<PinnedBlock> gradients_;
  uint64_t next_ticket_ = 1;
  uint64_t held_bytes_ = 0;     // live, or released and waiting
  uint64_t waiting_bytes_ = 0;  // for the next ticket
  uint64_t peak_bytes_ = 0;     // of held bytes
};

TEST_F(TwoThreadsThatDrainEachOtherTest, NeedNoMoreThanTheirPeak) {
  options_.segment_bytes = kLimitBytes;
  MakeWithLimit(kLimitBytes);
  for (uint64_t step = 0; step < kSteps && !HasFatalFailure(); ++step) RunStep(step);
  EXPECT_GT(peak_bytes_, kLimitBytes - kLimitBytes / 10) << "the limit is no longer near the peak";
  EXPECT_EQ(pin_calls(), 1u);
  EXPECT_EQ(Stats().allocations, kSteps * (30 + 15));
  EXPECT_EQ(Stats().polled_hits, 0u) << "something was missed that was free";
  EXPECT_LT(Stats().deferred_bytes.total, Stats().booked_bytes.total / 10) << "no batch has waited";
}

TEST_F(PinnedAllocatorThreadsTest, WhatIsReservedOnOneThreadServesAnother) {
  EXPECT_THAT(allocator_->Reserve(12 * kMiB), IsOk());
  const uint64_t pinned = pin_calls();
  OnAnotherThread([&] { TakeMany(12, kMiB - kSlack); });
  EXPECT_EQ(pin_calls(), pinned);
}

TEST_F(PinnedAllocatorThreadsTest, TrimGivesBackWhatOtherThreadsHaveFree) {
  PinnedBlock kept;
  OnAnotherThread([&] {
    const PinnedBlock large = Take(8 * kMiB - kSlack);
    kept = Take(kMiB - kSlack);
  });
  EXPECT_THAT(allocator_->Trim(0), IsOk());
  EXPECT_EQ(source_->outstanding_bytes(), 4 * kMiB);
  EXPECT_EQ(Stats().locked_bytes.current, 4 * kMiB);
}

TEST_F(PinnedAllocatorThreadsTest, StatisticsAddUpWhatThreadsDid) {
  const PinnedBlock mine = Take(kMiB - kSlack);
  PinnedBlock theirs;
  OnAnotherThread([&] {
    theirs = Take(kMiB - kSlack);
    const PinnedBlock small = Take(300);
  });
  EXPECT_THAT(CheckInvariants(Stats()), IsOk());
  EXPECT_EQ(Stats().allocations, 3u);
  EXPECT_EQ(Stats().misses, 1u);
  EXPECT_EQ(Stats().hits, 2u);
  EXPECT_EQ(Stats().requested_bytes.current, 2 * (kMiB - kSlack));
  EXPECT_EQ(Stats().requested_bytes.total, 2 * (kMiB - kSlack) + 300);
  EXPECT_EQ(Stats().locked_bytes.current, 4 * kMiB);
  EXPECT_EQ(Stats().locked_bytes.total, 4 * kMiB);
  ASSERT_EQ(Stats().numa_nodes.size(), 1u);
  EXPECT_EQ(Stats().numa_nodes[0].segments, 1u);
}

TEST_F(PinnedAllocatorThreadsTest, BlocksOfSeveralThreadsOutliveTheAllocator) {
  constexpr int kThreads = 6;
  std::vector<PinnedBlock> blocks(2 * kThreads);
  RunThreads(kThreads, [&](int thread) {
    blocks[2 * thread] = Take(200 * kKiB);
    blocks[2 * thread + 1] = Take(2000);
  });
  allocator_.reset();
  EXPECT_GT(source_->outstanding_bytes(), 0u);
  RunThreads(kThreads, [&](int thread) {
    blocks[2 * thread + 1] = PinnedBlock();
    const int next = (thread + 1) % kThreads;
    std::move(blocks[2 * next]).ReleaseAfter({timeline_->Ticket(0)});
  });
  EXPECT_EQ(source_->outstanding_bytes(), 0u);
}

}  // namespace
}  // namespace pinion
