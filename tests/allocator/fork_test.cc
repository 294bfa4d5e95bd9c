// A child of fork() may only drop inherited blocks and allocators; every other call is refused.

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/allocator/ram/host_ledger.h"
#include "pinion/allocator/sources/mmap_source.h"
#include "pinion/tests/support/child_process.h"
#include "pinion/tests/support/fake_host.h"
#include "pinion/tests/support/fake_source.h"
#include "pinion/tests/support/fake_timeline.h"
#include "pinion/tests/support/heap_source.h"
#include "pinion/tests/support/sanitizers.h"
#include "pinion/tests/support/status_matchers.h"
#include "pinion/tests/support/status_says.h"

namespace pinion {
namespace {

using ::pinion::testing::ChildProcess;
using ::pinion::testing::FakeHost;
using ::pinion::testing::FakeSource;
using ::pinion::testing::FakeTimeline;
using ::pinion::testing::ForkInTheMiddleOf;
using ::pinion::testing::HeapSource;
using ::pinion::testing::IsFailedPrecondition;
using ::pinion::testing::IsOk;
using ::pinion::testing::kForkBesideThreadsMayHang;

using Allocator = std::shared_ptr<PinnedAllocator>;

auto IsRefused() { return IsFailedPrecondition("before fork()", "make another one in the child"); }

class ForkTest : public ::testing::Test {
 protected:
  Allocator NewAllocator(std::shared_ptr<HostMemorySource> source) {
    AllocatorOptions options;
    options.segment_bytes = 2 * kMiB;
    return PinnedAllocator::Create(options, std::move(source), host_.Probe()).value();
  }
  Allocator OverMappedMemory() { return NewAllocator(MmapSource::Create().value()); }

  FakeHost host_;
};

TEST_F(ForkTest, EveryCallOfAChildIsRefusedWithARemedy) {
  const Allocator allocator = OverMappedMemory();
  const PinnedBlock block = allocator->Allocate(kMiB).value();
  ChildProcess child([&] {
    // One size is cached and the other is not.
    EXPECT_THAT(allocator->Allocate(kKiB), IsRefused());
    EXPECT_THAT(allocator->Allocate(10 * kMiB), IsRefused());
    EXPECT_THAT(allocator->Reserve(10 * kMiB), IsRefused());
    EXPECT_THAT(allocator->Trim(0), IsRefused());
  });
  EXPECT_EQ(child.Wait(), 0);
}

TEST_F(ForkTest, AChildMakesAnAllocatorOfItsOwn) {
  const Allocator parents = OverMappedMemory();
  ChildProcess child([&] {
    const Allocator own = OverMappedMemory();
    const absl::StatusOr<PinnedBlock> block = own->Allocate(kMiB);
    EXPECT_THAT(block, IsOk());
    std::memset(block->data(), 1, kMiB);
    EXPECT_THAT(own->Trim(0), IsOk());
  });
  EXPECT_EQ(child.Wait(), 0);
}

// The child has no mapping of the memory, and a write at release would crash it.
TEST_F(ForkTest, AChildDropsWhatItInheritedWithoutTouchingIt) {
  Allocator allocator = OverMappedMemory();
  std::optional<PinnedBlock> block = allocator->Allocate(kMiB).value();
  PinnedBlock moved_over = allocator->Allocate(kKiB).value();
  PinnedBlock deferred = allocator->Allocate(kMiB).value();
  const auto timeline = std::make_shared<FakeTimeline>();
  std::memset(block->data(), 7, kMiB);
  ChildProcess child([&] {
    block.reset();
    moved_over = PinnedBlock();
    std::move(deferred).ReleaseAfter({timeline->Ticket(1)});
    EXPECT_EQ(timeline.use_count(), 1) << "nobody keeps the ticket";
    allocator.reset();
  });
  EXPECT_EQ(child.Wait(), 0);
  EXPECT_EQ(static_cast<const char*>(block->data())[kMiB - 1], 7);
  block.reset();
  EXPECT_THAT(allocator->Allocate(kMiB), IsOk());
}

TEST_F(ForkTest, BlocksThatOutliveTheirAllocatorAreDroppedInAChildToo) {
  Allocator allocator = OverMappedMemory();
  std::optional<PinnedBlock> block = allocator->Allocate(kMiB).value();
  allocator.reset();
  ChildProcess child([&] { block.reset(); });
  EXPECT_EQ(child.Wait(), 0);
}

TEST_F(ForkTest, AChildGivesNothingBackToASourceThatKnowsNothingOfForks) {
  const auto source = std::make_shared<FakeSource>();
  Allocator allocator = NewAllocator(source);
  std::optional<PinnedBlock> block = allocator->Allocate(kMiB).value();
  allocator.reset();
  const uint64_t pinned_bytes = source->outstanding_bytes();
  ChildProcess child([&] {
    block.reset();
    EXPECT_EQ(source->outstanding_bytes(), pinned_bytes);
  });
  EXPECT_EQ(child.Wait(), 0);
  block.reset();
  EXPECT_EQ(source->outstanding_bytes(), 0u);
}

// The ticket may belong to a device that only the parent can use.
TEST_F(ForkTest, AChildWaitsForNoTicket) {
  Allocator allocator = OverMappedMemory();
  const auto timeline = std::make_shared<FakeTimeline>();
  allocator->Allocate(kMiB).value().ReleaseAfter({timeline->Ticket(1)});
  ChildProcess child([&] {
    allocator.reset();
    EXPECT_EQ(timeline->waits(), 0u);
  });
  EXPECT_EQ(child.Wait(), 0);
  timeline->CompleteOnDevice(1);
}

TEST_F(ForkTest, AChildThatExitsOrderlyLeavesTheParentsMemoryAlone) {
  GTEST_FLAG_SET(death_test_style, "fast");
  static Allocator allocator;
  static PinnedBlock block;
  allocator = NewAllocator(MmapSource::Create().value());
  block = allocator->Allocate(kMiB).value();
  EXPECT_EXIT(
      {
        block = PinnedBlock();
        allocator = nullptr;
        std::exit(0);
      },
      ::testing::ExitedWithCode(0), "");
  std::memset(block.data(), 1, kMiB);
  block = PinnedBlock();
  allocator = nullptr;
}

constexpr char kMayHang[] = "a child that allocates may wait for the sanitizer's locks";

// As the refusal tells it to.
TEST(ForkInTheMiddleTest, AChildMakesAnAllocatorWhateverOthersDidWithTheLedger) {
  if (kForkBesideThreadsMayHang) GTEST_SKIP() << kMayHang;
  ForkInTheMiddleOf([] { HostLedger::OfThisUser().Reserve(1); },
                    [] {
                      const absl::StatusOr<Allocator> made =
                          PinnedAllocator::Create({}, std::make_shared<HeapSource>());
                      ASSERT_THAT(made, IsOk());
                      EXPECT_THAT((*made)->Allocate(1), IsOk());
                    });
}

TEST(ForkInTheMiddleTest, AChildLogsWhateverOthersDidWithTheLog) {
  if (kForkBesideThreadsMayHang) GTEST_SKIP() << kMayHang;
  const LogSink quiet = [](LogSeverity, const std::string&) {};
  LogSink previous = SetLogSink(quiet);
  ForkInTheMiddleOf(
      [&quiet] {
        SetLogSink(quiet);
        PINION_LOG(kWarning) << "parent";
      },
      [] { PINION_LOG(kWarning) << "child"; });
  SetLogSink(std::move(previous));
}

// The child inherits the locks of threads that do not exist in it.
TEST_F(ForkTest, ForksInTheMiddleOfOtherThreadsCallsHoldUpNobody) {
  if (kForkBesideThreadsMayHang) GTEST_SKIP() << kMayHang;
  const Allocator mapped = OverMappedMemory();
  const Allocator heap = NewAllocator(std::make_shared<HeapSource>());
  std::atomic<bool> stop = false;
  std::atomic<uint64_t> calls = 0;
  Mutex mu;
  std::vector<PinnedBlock> exchanged;
  const auto hammer = [&](uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<PinnedBlock> blocks;
    while (!stop) {
      PinnedAllocator& allocator = random() % 2 == 0 ? *mapped : *heap;
      absl::StatusOr<PinnedBlock> block = allocator.Allocate(1 + random() % (3 * kMiB));
      ASSERT_THAT(block, IsOk());
      blocks.push_back(*std::move(block));
      if (blocks.size() > 4) blocks.erase(blocks.begin() + static_cast<int>(random() % 4));
      if (random() % 4 == 0) {
        const MutexLock lock(mu);
        std::swap(blocks, exchanged);  // the other thread releases them
      }
      if (random() % 16 == 0) {
        ASSERT_THAT(allocator.Trim(0), IsOk());
      }
      ++calls;
    }
  };
  std::thread threads[2] = {std::thread(hammer, 1), std::thread(hammer, 2)};
  PinnedBlock live[2] = {mapped->Allocate(kMiB).value(), heap->Allocate(kMiB).value()};
  for (int round = 0; round < 60; ++round) {
    ChildProcess child([&] {
      for (const Allocator& allocator : {mapped, heap}) {
        EXPECT_THAT(allocator->Allocate(kMiB), IsRefused());
        EXPECT_THAT(allocator->Reserve(kMiB), IsRefused());
        EXPECT_THAT(allocator->Trim(0), IsRefused());
        EXPECT_EQ(allocator->GetStats().locked_bytes.current, 0u);
        for (const PinnedBlock& block : live) EXPECT_FALSE(allocator->Owns(block.data()));
      }
      for (PinnedBlock& block : live) block = PinnedBlock();
    });
    const int outcome = child.Wait();
    EXPECT_EQ(outcome, 0) << "round " << round;
    if (outcome != 0) break;
  }
  // The forks must not have blocked the parent's threads either.
  const uint64_t before = calls;
  while (calls < before + 100 && !HasFailure()) absl::SleepFor(absl::Milliseconds(1));
  stop = true;
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace pinion
