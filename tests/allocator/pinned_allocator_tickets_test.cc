// Blocks that are released while a device still uses them.

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/thread_slot.h"
#include "pinion/allocator/fence.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/config/build_config.h"
#include "pinion/tests/allocator/pinned_allocator_fixture.h"
#include "pinion/tests/support/allocator_invariants.h"
#include "pinion/tests/support/captured_log.h"
#include "pinion/tests/support/fake_source.h"
#include "pinion/tests/support/fake_timeline.h"
#include "pinion/tests/support/status_matchers.h"
#include "pinion/tests/support/worker.h"

namespace pinion {
namespace {

using ::pinion::testing::CapturedLog;
using ::pinion::testing::CheckInvariants;
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

// Completes only when waited for, or after `done_after_looks` calls of Completed. Can run an action
// inside such a call.
class CountingTimeline final : public FenceTimeline {
 public:
  explicit CountingTimeline(int done_after_looks = INT_MAX) : done_after_looks_(done_after_looks) {}

  uint64_t Completed() const noexcept override {
    if (on_look) on_look();
    return ++looks_ > done_after_looks_ ? UINT64_MAX : done_.load();
  }
  void Poll() override {}
  absl::Status Wait(uint64_t value, absl::Duration timeout) override {
    waited_for.push_back(value);
    longest_wait = std::max(longest_wait, timeout);
    if (waits_in_vain-- > 0) return refusal;
    done_ = value;
    return absl::OkStatus();
  }
  int looks() const { return looks_; }

  std::function<void()> on_look;
  int waits_in_vain = 0;
  absl::Status refusal = absl::DeadlineExceededError("not yet");  // of waits in vain
  std::vector<uint64_t> waited_for;
  absl::Duration longest_wait = absl::ZeroDuration();

 private:
  const int done_after_looks_;
  mutable std::atomic<int> looks_ = 0;
  std::atomic<uint64_t> done_ = 0;
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

TEST_F(PinnedAllocatorTicketsTest, OfWhatSeveralThreadsReleasedTheEarliestTicketIsWaitedFor) {
  MakeWithWait(absl::Seconds(60));
  const auto timeline = std::make_shared<CountingTimeline>();
  PinnedBlock mine = Take(4 * kMiB - kSlack);
  OnAnotherThread([&] { Take(4 * kMiB - kSlack).ReleaseAfter({{timeline, 2}}); });
  std::move(mine).ReleaseAfter({{timeline, 5}});
  Take(4 * kMiB - kSlack);
  EXPECT_THAT(timeline->waited_for, ElementsAre(2));
}

// The allowed time is split into several waits; a wait that times out must not end the allocation.
TEST_F(PinnedAllocatorTicketsTest, AShareOfTheWaitThatWasInVainIsNotTheEndOfIt) {
  MakeWithWait(absl::Seconds(60));
  const auto timeline = std::make_shared<CountingTimeline>();
  timeline->waits_in_vain = 2;
  Take(4 * kMiB - kSlack).ReleaseAfter({{timeline, 1}});
  Take(4 * kMiB - kSlack);
  EXPECT_EQ(Stats().pin_calls, 1u);
}

TEST_F(PinnedAllocatorTicketsTest, ABlockThatOutlivesItsAllocatorWaitsForItsTicket) {
  PinnedBlock block = Take(kMiB);
  allocator_.reset();
  timeline_->CompleteOnDevice(1);
  std::move(block).ReleaseAfter({timeline_->Ticket(1)});
  EXPECT_EQ(timeline_->waits(), 1u);
}

// Reading the counter moves its cache line away from the thread that advances it.
TEST_F(PinnedAllocatorTicketsTest, OneHitInFourLooksAtATimelineAlsoBetweenReleasesWithTickets) {
  const auto timeline = std::make_shared<CountingTimeline>();
  Take(kMiB).ReleaseAfter({{timeline, 1}});
  (void)Stats();
  int before = timeline->looks();
  for (int i = 0; i < 400; ++i) (void)allocator_->Allocate(kMiB);
  EXPECT_EQ(timeline->looks() - before, 100);
  if (config::kHardened) GTEST_SKIP() << "hardened builds lay aside what is released";
  before = timeline->looks();
  for (uint64_t i = 1; i <= 400; ++i) {
    Take(kMiB).ReleaseAfter({timeline_->Ticket(i)});
    timeline_->CompleteVisibly(i);  // before the next hit
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
  (void)Stats();
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
  EXPECT_EQ(Stats().deferred_bytes.current, Stats().used_bytes.current);
}

class LookedAtTest : public PinnedAllocatorFixture {
 protected:
  // Begins `body` on another thread at the `nth` look from now on. `body` must wait for its end.
  void BeginAtLook(int nth, const std::function<void()>& body) {
    looks_left_ = nth;
    looked_at_->on_look = [this, body] {
      if (--looks_left_ != 0) return;
      thread_ = std::thread([this, body] {
        body();
        ended_ = true;
      });
      absl::SleepFor(absl::Milliseconds(20));
      EXPECT_FALSE(ended_);
    };
  }
  void Join() {
    thread_.join();
    looked_at_->on_look = nullptr;
  }

  const std::shared_ptr<CountingTimeline> looked_at_ = std::make_shared<CountingTimeline>();
  std::atomic<int> looks_left_ = 0;
  std::thread thread_;
  std::atomic<bool> ended_ = false;
};

TEST_F(LookedAtTest, AThreadWaitsWhileAnotherOneLooksAtItsArena) {
  Worker owner;
  owner.Run([&] {
    Take(kMiB).ReleaseAfter({{looked_at_, 1}});
    Take(kKiB);
  });
  BeginAtLook(1, [&] { owner.Run([&] { (void)allocator_->Allocate(kKiB); }); });
  EXPECT_THAT(allocator_->Trim(0), IsOk());
  Join();
}

// The next thread inherits the slot and the arena while Trim inspects the arena.
TEST_F(LookedAtTest, AThreadMayEndAndAnotherTakeOverWhileItsArenaIsLookedAt) {
  auto first_owner = std::make_unique<Worker>();
  int number = kNoThreadSlot;
  first_owner->Run([&] {
    Take(kMiB).ReleaseAfter({{looked_at_, 1}});
    Take(kKiB);
    number = ThreadSlot();
  });
  BeginAtLook(1, [&] {
    first_owner = nullptr;
    EXPECT_EQ(ThreadSlot(), number);
    EXPECT_THAT(allocator_->Allocate(kKiB), IsOk());
  });
  EXPECT_THAT(allocator_->Trim(0), IsOk());
  Join();
  EXPECT_THAT(CheckInvariants(Stats()), IsOk());
  EXPECT_EQ(Stats().allocations, 3u);
}

// The release comes after its buffer was closed and before the arena is destroyed. The first look
// is for the release in the buffer that is being closed.
TEST_F(LookedAtTest, ABlockThatIsReleasedWhileTheAllocatorGoesIsCounted) {
  PinnedBlock block = Take(kMiB);
  Take(kMiB).ReleaseAfter({{looked_at_, 1}});
  BeginAtLook(2, [&] { block = PinnedBlock(); });
  allocator_.reset();
  Join();
  EXPECT_THAT(looked_at_->waited_for, ElementsAre(1));
  EXPECT_EQ(source_->outstanding_bytes(), 0u);
}

TEST_F(PinnedAllocatorTicketsTest, TicketsThatAreDoneOrAbsentDoNotDefer) {
  timeline_->CompleteVisibly(3);
  Take(kMiB).ReleaseAfter({timeline_->Ticket(3), FenceTicket()});
  Take(kMiB).ReleaseAfter({});
  EXPECT_EQ(Stats().deferred_bytes.peak, 0u);
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
}

TEST_F(PinnedAllocatorTicketsTest, AMissAsksTheDeviceBeforeItGrows) {
  Take(4 * kMiB - kSlack).ReleaseAfter({timeline_->Ticket(1)});
  timeline_->CompleteOnDevice(1);
  Take(4 * kMiB - kSlack);
  EXPECT_EQ(timeline_->polls(), 1u);
  EXPECT_EQ(Stats().pin_calls, 1u);
  EXPECT_EQ(Stats().polled_hits, 1u);
}

TEST_F(PinnedAllocatorTicketsTest, NoDeviceIsAskedForWhatAnotherThreadReleasedAndIsDone) {
  PinnedBlock block = Take(4 * kMiB - kSlack);
  OnAnotherThread([&] { std::move(block).ReleaseAfter({timeline_->Ticket(1)}); });
  timeline_->CompleteVisibly(1);
  Take(4 * kMiB - kSlack);
  EXPECT_EQ(Stats().polled_hits, 0u);
  EXPECT_EQ(Stats().pin_calls, 1u);
}

TEST_F(PinnedAllocatorTicketsTest, ByDefaultAMissGrowsRatherThanWaits) {
  Take(4 * kMiB - kSlack).ReleaseAfter({timeline_->Ticket(1)});
  Take(4 * kMiB - kSlack);
  EXPECT_EQ(timeline_->waits(), 0u);
  EXPECT_EQ(Stats().waits_for_deferred, 0u);
  EXPECT_EQ(Stats().pin_calls, 2u);
}

TEST_F(PinnedAllocatorTicketsTest, ATimelineThatIsStuckDoesNotUseUpTheWaitOfAnother) {
  MakeWithWait(absl::Seconds(60));
  const auto stuck = std::make_shared<CountingTimeline>();
  stuck->waits_in_vain = 1;
  Take(2 * kMiB - kSlack).ReleaseAfter({{stuck, 1}});
  PinnedBlock other = Take(2 * kMiB - kSlack);
  std::move(other).ReleaseAfter({{std::make_shared<CountingTimeline>(), 1}});
  Take(2 * kMiB - kSlack);
  EXPECT_EQ(Stats().waits_for_deferred, 1u);
  EXPECT_EQ(Stats().waited_hits, 1u);
  EXPECT_EQ(Stats().pin_calls, 1u);
  EXPECT_THAT(stuck->waited_for, ElementsAre(1));
  EXPECT_LE(stuck->longest_wait, absl::Seconds(30)) << "half of the time";
}

// A block whose ticket completes between two checks must be found, or the miss would pin a segment.
TEST_F(PinnedAllocatorTicketsTest, WhenATicketGetsDoneDuringAMissItsBlockServesIt) {
  options_.max_wait_for_deferred = absl::Minutes(1);
  for (int looks = 0; looks < 12; ++looks) {
    Make();
    Take(4 * kMiB - kSlack).ReleaseAfter({{std::make_shared<CountingTimeline>(looks), 1}});
    (void)allocator_->Allocate(4 * kMiB - kSlack);
    EXPECT_EQ(Stats().pin_calls, 1u) << "done after " << looks << " looks";
  }
}

TEST_F(PinnedAllocatorTicketsTest, TheWaitGoesOnUntilWhatIsDoneIsEnough) {
  options_.max_locked_bytes = 4 * kMiB;
  MakeWithWait(absl::Seconds(60));
  PinnedBlock low = Take(2 * kMiB - kSlack);
  PinnedBlock high = Take(2 * kMiB - kSlack);
  const auto timeline = std::make_shared<CountingTimeline>();
  std::move(low).ReleaseAfter({{timeline, 1}});
  std::move(high).ReleaseAfter({{timeline, 2}});
  Take(4 * kMiB - kSlack);
  EXPECT_EQ(Stats().waited_hits, 1u);
}

TEST_F(PinnedAllocatorTicketsTest, TheWaitEndsAndTheAllocatorGrows) {
  MakeWithWait(absl::Milliseconds(1));
  Take(4 * kMiB - kSlack).ReleaseAfter({timeline_->Ticket(1)});
  Take(4 * kMiB - kSlack);
  EXPECT_EQ(Stats().waits_for_deferred, 1u);
  EXPECT_EQ(Stats().pin_calls, 2u);
}

TEST_F(PinnedAllocatorTicketsTest, TheEndWaitsForAllTicketsOfATimeline) {
  const auto timeline = std::make_shared<CountingTimeline>();
  Take(kMiB).ReleaseAfter({timeline_->Ticket(1)});
  Take(kMiB).ReleaseAfter({{timeline, 1}});
  Take(kMiB).ReleaseAfter({{timeline, 2}});
  timeline_->CompleteOnDevice(1);
  allocator_.reset();
  EXPECT_EQ(source_->outstanding_bytes(), 0u);
}

TEST_F(PinnedAllocatorTicketsTest, MemoryThatADeviceMayStillWriteToIsLeaked) {
  const auto source = std::make_shared<FakeSource>();
  MakeOver(source);
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
  OnAnotherThread([&] { Take(kMiB).ReleaseAfter({timeline->Ticket(1)}); });
  timeline->CompleteVisibly(1);
  timeline.reset();
  for (int i = 0; i < 20'000; ++i) (void)allocator_->Allocate(100 * kKiB);
  EXPECT_TRUE(watch.expired());
}

// An exiting process does not ask the device, so the message must not blame a slow copy.
TEST_F(PinnedAllocatorTicketsTest, WhatIsLeakedAtTheEndSaysWhy) {
  const auto timeline = std::make_shared<CountingTimeline>();
  timeline->waits_in_vain = 1;
  timeline->refusal = absl::FailedPreconditionError("the process is exiting");
  MakeOver(std::make_shared<FakeSource>());
  Take(kMiB).ReleaseAfter({{timeline, 1}});
  const CapturedLog log;
  allocator_.reset();
  EXPECT_THAT(log.text(), AllOf(HasSubstr("leaking"), HasSubstr("the process is exiting"),
                                Not(HasSubstr("not done"))));
  EXPECT_EQ(std::count(log.text().begin(), log.text().end(), '\n'), 1);
}

}  // namespace
}  // namespace pinion
