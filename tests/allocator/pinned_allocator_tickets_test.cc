// Blocks that are released while a device still uses them.

#include <atomic>
#include <climits>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/allocator_stats.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/thread_slot.h"
#include "pinion/allocator/fence.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/config/build_config.h"
#include "pinion/tests/allocator/pinned_allocator_fixture.h"
#include "pinion/tests/support/fake_source.h"
#include "pinion/tests/support/fake_timeline.h"
#include "pinion/tests/support/status_matchers.h"
#include "pinion/tests/support/worker.h"

namespace pinion {
namespace {

using ::pinion::testing::FakeSource;
using ::pinion::testing::FakeTimeline;
using ::pinion::testing::IsOk;
using ::pinion::testing::IsOkAndHolds;
using ::pinion::testing::kSlack;
using ::pinion::testing::PinnedAllocatorFixture;
using ::pinion::testing::Worker;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

using PinnedAllocatorTicketsTest = PinnedAllocatorFixture;

// Completes at the first Wait, but not at the Poll before it, or after `looks` calls of Completed.
class DoneWhenWaitedFor final : public FenceTimeline {
 public:
  explicit DoneWhenWaitedFor(int looks = INT_MAX) : looks_(looks) {}
  uint64_t Completed() const noexcept override { return looks_-- > 0 ? done_ : UINT64_MAX; }
  void Poll() override {}
  absl::Status Wait(uint64_t value, absl::Duration) override {
    done_ = value;
    return absl::OkStatus();
  }

 private:
  mutable int looks_;
  uint64_t done_ = 0;
};

TEST_F(PinnedAllocatorTicketsTest, ADeferredBlockIsNotUsedBeforeItsTicketIsDone) {
  PinnedBlock block = Take(3 * kMiB);
  void* const data = block.data();
  const PinnedBlock rest = Take(kMiB - 2 * kSlack);
  std::move(block).ReleaseAfter({timeline_->Ticket(1)});
  EXPECT_TRUE(block.empty());
  const PinnedBlock other = Take(2 * kMiB);
  EXPECT_NE(other.data(), data);
  timeline_->CompleteVisibly(1);
  EXPECT_EQ(Take(3 * kMiB).data(), data);
}

TEST_F(PinnedAllocatorTicketsTest, ATicketIsDoneFromItsValueOn) {
  timeline_->CompleteVisibly(3);
  EXPECT_TRUE(timeline_->Ticket(3).IsDone());
  EXPECT_FALSE(timeline_->Ticket(4).IsDone());
  EXPECT_TRUE(FenceTicket().IsDone());
}

// A thread's own buffered releases are entered before it allocates.
TEST_F(PinnedAllocatorTicketsTest, WhatAThreadReleasedServesItsNextAllocation) {
  PinnedBlock block = Take(kMiB - kSlack);
  const PinnedBlock next = Take(100 * kKiB);  // separates the block from the remaining memory
  PinnedBlock more[] = {Take(100 * kKiB), Take(100 * kKiB), Take(100 * kKiB)};
  void* const data = block.data();
  std::move(block).ReleaseAfter({timeline_->Ticket(1)});
  for (PinnedBlock& other : more) std::move(other).ReleaseAfter({timeline_->Ticket(1)});
  timeline_->CompleteVisibly(1);
  EXPECT_EQ(allocator_->Allocate(kMiB - kSlack)->data(), data);
}

// After many hits with nothing deferred, the thread must still notice that a release waits.
TEST_F(PinnedAllocatorTicketsTest, WhatStartsToWaitAmongManyHitsServesSoonAfterItIsDone) {
  PinnedBlock block = Take(kMiB - kSlack);
  const PinnedBlock next = Take(100 * kKiB);  // separates the block from the remaining memory
  for (int i = 0; i < 10; ++i) Take(100 * kKiB);
  void* const data = block.data();
  const auto other = std::make_shared<FakeTimeline>();
  std::move(block).ReleaseAfter({timeline_->Ticket(1), other->Ticket(1)});
  timeline_->CompleteVisibly(1);
  other->CompleteVisibly(1);
  bool served = false;
  for (int i = 0; i < 8; ++i) served |= allocator_->Allocate(kMiB - kSlack)->data() == data;
  EXPECT_TRUE(served);
}

// Completes only when waited for. Counts calls of Completed, and can run an action inside one.
class CountingTimeline final : public FenceTimeline {
 public:
  uint64_t Completed() const noexcept override {
    ++looks_;
    if (on_look) on_look();
    return done_;
  }
  void Poll() override {}
  absl::Status Wait(uint64_t value, absl::Duration timeout) override {
    waited_for.push_back(value);
    longest_wait = std::max(longest_wait, timeout);
    if (waits_in_vain-- > 0) return absl::DeadlineExceededError("not yet");
    done_ = value;
    return absl::OkStatus();
  }
  int looks() const { return looks_; }

  std::function<void()> on_look;
  int waits_in_vain = 0;
  std::vector<uint64_t> waited_for;
  absl::Duration longest_wait = absl::ZeroDuration();

 private:
  mutable std::atomic<int> looks_ = 0;
  std::atomic<uint64_t> done_ = 0;
};

TEST_F(PinnedAllocatorTicketsTest, OfWhatSeveralThreadsReleasedTheEarliestTicketIsWaitedFor) {
  options_.max_wait_for_deferred = absl::Seconds(60);
  Make();
  const auto timeline = std::make_shared<CountingTimeline>();
  PinnedBlock mine = Take(4 * kMiB - kSlack);
  std::thread([&] { Take(4 * kMiB - kSlack).ReleaseAfter({{timeline, 2}}); }).join();
  std::move(mine).ReleaseAfter({{timeline, 5}});
  Take(4 * kMiB - kSlack);
  EXPECT_THAT(timeline->waited_for, ElementsAre(2));
  allocator_.reset();
}

// The allowed time is split into several waits; a wait that times out must not end the allocation.
TEST_F(PinnedAllocatorTicketsTest, AShareOfTheWaitThatWasInVainIsNotTheEndOfIt) {
  options_.max_wait_for_deferred = absl::Seconds(60);
  Make();
  const auto timeline = std::make_shared<CountingTimeline>();
  timeline->waits_in_vain = 2;
  Take(4 * kMiB - kSlack).ReleaseAfter({{timeline, 1}});
  Take(4 * kMiB - kSlack);
  EXPECT_EQ(allocator_->GetStats().pin_calls, 1u);
}

TEST_F(PinnedAllocatorTicketsTest, ABlockThatOutlivesItsAllocatorWaitsForItsTicket) {
  PinnedBlock block = Take(kMiB);
  allocator_.reset();
  timeline_->CompleteOnDevice(1);
  std::move(block).ReleaseAfter({timeline_->Ticket(1)});
  EXPECT_EQ(timeline_->waits(), 1u);
}

// Reading the counter moves its cache line away from the thread that advances it.
TEST_F(PinnedAllocatorTicketsTest, OneHitInFourLooksAtATimeline) {
  const auto timeline = std::make_shared<CountingTimeline>();
  Take(kMiB).ReleaseAfter({{timeline, 1}});
  (void)allocator_->GetStats();
  const int before = timeline->looks();
  for (int i = 0; i < 400; ++i) (void)allocator_->Allocate(kMiB);
  EXPECT_EQ(timeline->looks() - before, 100);
}

// The releases in between use another timeline, which completes before the next hit.
TEST_F(PinnedAllocatorTicketsTest, OneHitInFourLooksAtATimelineBetweenReleasesWithTickets) {
  if (config::kHardened) GTEST_SKIP() << "hardened builds lay aside what is released";
  const auto timeline = std::make_shared<CountingTimeline>();
  Take(kMiB).ReleaseAfter({{timeline, 1}});
  (void)allocator_->GetStats();
  const int before = timeline->looks();
  for (uint64_t i = 1; i <= 400; ++i) {
    Take(kMiB).ReleaseAfter({timeline_->Ticket(i)});
    timeline_->CompleteVisibly(i);
  }
  EXPECT_NEAR(timeline->looks() - before, 100, 4);
}

// A release takes no lock of the arena: here it would deadlock with the waiting allocation.
TEST_F(PinnedAllocatorTicketsTest, ABlockIsReleasedWhileTheBooksAreLocked) {
  if (config::kHardened) GTEST_SKIP() << "hardened builds mark it in the books at once";
  const auto timeline = std::make_shared<CountingTimeline>();
  PinnedBlock plain = Take(100 * kKiB);
  PinnedBlock deferred = Take(100 * kKiB);
  Take(kMiB).ReleaseAfter({{timeline, 1}});
  (void)allocator_->GetStats();
  timeline->on_look = [&] {
    std::thread([&] {
      plain = PinnedBlock();
      if (deferred.empty()) return;
      std::move(deferred).ReleaseAfter({timeline_->Ticket(1), FenceTicket()});
    }).join();
  };
  for (int i = 0; i < 4; ++i) (void)allocator_->Allocate(kMiB);
  timeline->on_look = nullptr;
  EXPECT_TRUE(plain.empty() && deferred.empty());
  EXPECT_EQ(allocator_->GetStats().deferred_bytes.current,
            allocator_->GetStats().used_bytes.current);
  timeline_->CompleteVisibly(1);
}

TEST_F(PinnedAllocatorTicketsTest, AThreadWaitsWhileAnotherOneLooksAtItsArena) {
  const auto timeline = std::make_shared<CountingTimeline>();
  Worker owner;
  owner.Run([&] {
    Take(kMiB).ReleaseAfter({{timeline, 1}});
    Take(kKiB);
  });
  std::atomic<bool> allocated = false;
  std::thread waiting;
  timeline->on_look = [&] {
    if (waiting.joinable()) return;
    waiting = std::thread([&] {
      owner.Run([&] { (void)allocator_->Allocate(kKiB); });
      allocated = true;
    });
    absl::SleepFor(absl::Milliseconds(20));
    EXPECT_FALSE(allocated);
  };
  EXPECT_THAT(allocator_->Trim(0), IsOk());
  waiting.join();
  EXPECT_TRUE(allocated);
  timeline->on_look = nullptr;
}

// The next thread inherits the slot and the arena while Trim inspects the arena.
TEST_F(PinnedAllocatorTicketsTest, AThreadMayEndAndAnotherTakeOverWhileItsArenaIsLookedAt) {
  const auto timeline = std::make_shared<CountingTimeline>();
  auto first_owner = std::make_unique<Worker>();
  int number = kNoThreadSlot;
  first_owner->Run([&] {
    Take(kMiB).ReleaseAfter({{timeline, 1}});
    Take(kKiB);
    number = ThreadSlot();
  });
  std::atomic<bool> allocated = false;
  std::thread next_owner;
  timeline->on_look = [&] {
    if (first_owner == nullptr) return;
    first_owner = nullptr;
    next_owner = std::thread([&] {
      EXPECT_EQ(ThreadSlot(), number);
      EXPECT_TRUE(allocator_->Allocate(kKiB).ok());
      allocated = true;
    });
    absl::SleepFor(absl::Milliseconds(20));
    EXPECT_FALSE(allocated);
  };
  EXPECT_THAT(allocator_->Trim(0), IsOk());
  next_owner.join();
  timeline->on_look = nullptr;
  const AllocatorStats stats = allocator_->GetStats();
  EXPECT_THAT(stats.CheckInvariants(), IsOk());
  EXPECT_EQ(stats.allocations, 3u);
}

// The release comes after its buffer was closed and before the arena is destroyed.
TEST_F(PinnedAllocatorTicketsTest, ABlockThatIsReleasedWhileTheAllocatorGoesIsCounted) {
  const auto timeline = std::make_shared<CountingTimeline>();
  PinnedBlock block = Take(kMiB);
  Take(kMiB).ReleaseAfter({{timeline, 1}});
  std::atomic<bool> released = false;
  std::thread releasing;
  std::atomic<int> looks = 0;
  timeline->on_look = [&] {
    // The first call is for the release in the buffer that is being closed.
    if (++looks != 2) return;
    releasing = std::thread([&] {
      block = PinnedBlock();
      released = true;
    });
    absl::SleepFor(absl::Milliseconds(20));
    EXPECT_FALSE(released);
  };
  allocator_.reset();
  releasing.join();
  EXPECT_EQ(timeline->waited_for, std::vector<uint64_t>{1});
  EXPECT_EQ(source_->outstanding_bytes(), 0u);
}

TEST_F(PinnedAllocatorTicketsTest, TicketsThatAreDoneOrAbsentDoNotDefer) {
  timeline_->CompleteVisibly(3);
  Take(kMiB).ReleaseAfter({timeline_->Ticket(3), FenceTicket()});
  Take(kMiB).ReleaseAfter({});
  EXPECT_EQ(allocator_->GetStats().deferred_bytes.peak, 0u);
}

TEST_F(PinnedAllocatorTicketsTest, ATicketWithoutATimelineIsDoneWhateverItsNumber) {
  const auto other = std::make_shared<FakeTimeline>();
  Take(kMiB).ReleaseAfter({{nullptr, 7}, timeline_->Ticket(1), other->Ticket(1)});
  timeline_->CompleteVisibly(1);
  other->CompleteVisibly(1);
  EXPECT_EQ(allocator_->Trim(0).value(), 4 * kMiB);
}

TEST_F(PinnedAllocatorTicketsTest, AHitAsksNoDevice) {
  Take(kMiB).ReleaseAfter({timeline_->Ticket(1)});
  for (int i = 0; i < 100; ++i) Take(kMiB);
  EXPECT_EQ(timeline_->polls() + timeline_->waits(), 0u);
  timeline_->CompleteVisibly(1);
}

TEST_F(PinnedAllocatorTicketsTest, AMissAsksTheDeviceBeforeItGrows) {
  Take(4 * kMiB - kSlack).ReleaseAfter({timeline_->Ticket(1)});
  timeline_->CompleteOnDevice(1);
  Take(4 * kMiB - kSlack);
  EXPECT_EQ(timeline_->polls(), 1u);
  EXPECT_EQ(allocator_->GetStats().pin_calls, 1u);
  EXPECT_EQ(allocator_->GetStats().polled_hits, 1u);
}

TEST_F(PinnedAllocatorTicketsTest, NoDeviceIsAskedForWhatAnotherThreadReleasedAndIsDone) {
  PinnedBlock block = Take(4 * kMiB - kSlack);
  std::thread([&] { std::move(block).ReleaseAfter({timeline_->Ticket(1)}); }).join();
  timeline_->CompleteVisibly(1);
  Take(4 * kMiB - kSlack);
  EXPECT_EQ(allocator_->GetStats().polled_hits, 0u);
  EXPECT_EQ(allocator_->GetStats().pin_calls, 1u);
}

TEST_F(PinnedAllocatorTicketsTest, ByDefaultAMissGrowsRatherThanWaits) {
  Take(4 * kMiB - kSlack).ReleaseAfter({timeline_->Ticket(1)});
  Take(4 * kMiB - kSlack);
  EXPECT_EQ(timeline_->waits(), 0u);
  EXPECT_EQ(allocator_->GetStats().waits_for_deferred, 0u);
  EXPECT_EQ(allocator_->GetStats().pin_calls, 2u);
  timeline_->CompleteVisibly(1);
}

TEST_F(PinnedAllocatorTicketsTest, ATimelineThatIsStuckDoesNotUseUpTheWaitOfAnother) {
  options_.max_wait_for_deferred = absl::Seconds(60);
  Make();
  const auto stuck = std::make_shared<CountingTimeline>();
  stuck->waits_in_vain = 1;
  Take(2 * kMiB - kSlack).ReleaseAfter({{stuck, 1}});
  PinnedBlock other = Take(2 * kMiB - kSlack);
  std::move(other).ReleaseAfter({{std::make_shared<DoneWhenWaitedFor>(), 1}});
  Take(2 * kMiB - kSlack);
  const AllocatorStats stats = allocator_->GetStats();
  EXPECT_EQ(stats.waits_for_deferred, 1u);
  EXPECT_EQ(stats.waited_hits, 1u);
  EXPECT_EQ(stats.pin_calls, 1u);
  EXPECT_THAT(stuck->waited_for, ElementsAre(1));
  EXPECT_LE(stuck->longest_wait, absl::Seconds(30)) << "half of the time";
}

// A block whose ticket completes between two checks must be found, or the miss would pin a segment.
TEST_F(PinnedAllocatorTicketsTest, WhenATicketGetsDoneDuringAMissItsBlockServesIt) {
  options_.max_wait_for_deferred = absl::Minutes(1);
  for (int looks = 0; looks < 12; ++looks) {
    Make();
    Take(4 * kMiB - kSlack).ReleaseAfter({{std::make_shared<DoneWhenWaitedFor>(looks), 1}});
    (void)allocator_->Allocate(4 * kMiB - kSlack);
    EXPECT_EQ(allocator_->GetStats().pin_calls, 1u) << "done after " << looks << " looks";
  }
}

TEST_F(PinnedAllocatorTicketsTest, TheWaitGoesOnUntilWhatIsDoneIsEnough) {
  options_.max_locked_bytes = 4 * kMiB;
  options_.max_wait_for_deferred = absl::Seconds(60);
  Make();
  PinnedBlock low = Take(2 * kMiB - kSlack);
  PinnedBlock high = Take(2 * kMiB - kSlack);
  const auto timeline = std::make_shared<DoneWhenWaitedFor>();
  std::move(low).ReleaseAfter({{timeline, 1}});
  std::move(high).ReleaseAfter({{timeline, 2}});
  Take(4 * kMiB - kSlack);
  EXPECT_EQ(allocator_->GetStats().waited_hits, 1u);
}

TEST_F(PinnedAllocatorTicketsTest, TheWaitEndsAndTheAllocatorGrows) {
  options_.max_wait_for_deferred = absl::Milliseconds(1);
  Make();
  Take(4 * kMiB - kSlack).ReleaseAfter({timeline_->Ticket(1)});
  Take(4 * kMiB - kSlack);
  EXPECT_EQ(allocator_->GetStats().waits_for_deferred, 1u);
  EXPECT_EQ(allocator_->GetStats().pin_calls, 2u);
  timeline_->CompleteVisibly(1);
}

TEST_F(PinnedAllocatorTicketsTest, TheEndWaitsForTickets) {
  Take(kMiB).ReleaseAfter({timeline_->Ticket(1)});
  timeline_->CompleteOnDevice(1);
  allocator_.reset();
  EXPECT_EQ(source_->outstanding_bytes(), 0u);
}

TEST_F(PinnedAllocatorTicketsTest, TheEndWaitsForOneTicketOfATimelineAfterAnother) {
  const auto timeline = std::make_shared<CountingTimeline>();
  Take(kMiB).ReleaseAfter({{timeline, 1}});
  Take(kMiB).ReleaseAfter({{timeline, 2}});
  allocator_.reset();
  EXPECT_EQ(source_->outstanding_bytes(), 0u);
}

TEST_F(PinnedAllocatorTicketsTest, MemoryThatADeviceMayStillWriteToIsLeaked) {
  const auto source = std::make_shared<FakeSource>();
  PINION_ASSERT_OK_AND_ASSIGN(allocator_, PinnedAllocator::Create(options_, source, host_.Probe()));
  Take(8 * kMiB);
  Take(kMiB).ReleaseAfter({timeline_->Ticket(1)});  // in its own segment or the one above
  allocator_.reset();
  EXPECT_GT(source->outstanding_bytes(), 0u);
}

TEST_F(PinnedAllocatorTicketsTest, TrimKeepsSegmentsWithDeferredBlocks) {
  Take(kMiB).ReleaseAfter({timeline_->Ticket(1)});
  EXPECT_THAT(allocator_->Trim(0), IsOkAndHolds(0u));
  timeline_->CompleteOnDevice(1);
  EXPECT_THAT(allocator_->Trim(0), IsOkAndHolds(4 * kMiB));
}

// A buffered release keeps its timeline alive, and with it the device's stream.
TEST_F(PinnedAllocatorTicketsTest, AThreadThatHasEndedHoldsOnToNothing) {
  auto timeline = std::make_shared<FakeTimeline>();
  const std::weak_ptr<FakeTimeline> watch = timeline;
  (void)allocator_->Allocate(kKiB);  // this thread has an arena of its own
  std::thread([&] { Take(kMiB).ReleaseAfter({timeline->Ticket(1)}); }).join();
  timeline->CompleteVisibly(1);
  timeline.reset();
  for (int i = 0; i < 20'000; ++i) (void)allocator_->Allocate(100 * kKiB);
  EXPECT_TRUE(watch.expired());
}

// An exiting process does not ask the device, so the message must not blame a slow copy.
TEST_F(PinnedAllocatorTicketsTest, WhatIsLeakedAtTheEndSaysWhy) {
  class Refuses final : public FenceTimeline {
   public:
    uint64_t Completed() const noexcept override { return 0; }
    void Poll() override {}
    absl::Status Wait(uint64_t, absl::Duration) override {
      return absl::FailedPreconditionError("the process is exiting");
    }
  };
  PINION_ASSERT_OK_AND_ASSIGN(
      allocator_, PinnedAllocator::Create(options_, std::make_shared<FakeSource>(), host_.Probe()));
  Take(kMiB).ReleaseAfter({{std::make_shared<Refuses>(), 1}});
  std::vector<std::string> lines;
  LogSink previous =
      SetLogSink([&](LogSeverity, const std::string& message) { lines.push_back(message); });
  allocator_.reset();
  SetLogSink(std::move(previous));
  EXPECT_THAT(lines, ElementsAre(AllOf(HasSubstr("leaking"), HasSubstr("the process is exiting"),
                                       Not(HasSubstr("not done")))));
}

}  // namespace
}  // namespace pinion
