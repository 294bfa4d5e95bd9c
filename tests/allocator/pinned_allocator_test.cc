// Properties, statistics and lifetime of blocks.

#include "pinion/allocator/pinned_allocator.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/allocator_stats.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/allocator/sources/mmap_source.h"
#include "pinion/config/build_config.h"
#include "pinion/tests/allocator/pinned_allocator_fixture.h"
#include "pinion/tests/support/allocator_invariants.h"
#include "pinion/tests/support/captured_log.h"
#include "pinion/tests/support/fake_host.h"
#include "pinion/tests/support/fake_source.h"
#include "pinion/tests/support/status_matchers.h"
#include "pinion/tests/support/status_says.h"

namespace pinion {
namespace {

using ::pinion::testing::CapturedLog;
using ::pinion::testing::CheckInvariants;
using ::pinion::testing::FakeHost;
using ::pinion::testing::FakeSource;
using ::pinion::testing::IsExhausted;
using ::pinion::testing::IsInternalError;
using ::pinion::testing::IsInvalid;
using ::pinion::testing::IsOk;
using ::pinion::testing::kSlack;
using ::pinion::testing::PinnedAllocatorFixture;
using ::testing::HasSubstr;

using PinnedAllocatorTest = PinnedAllocatorFixture;

TEST_F(PinnedAllocatorTest, BadOptionsAreRefusedByName) {
  EXPECT_THAT(PinnedAllocator::Create({}, nullptr), IsInvalid("source"));
  EXPECT_THAT(PinnedAllocator::Create({}, std::make_shared<FakeSource>(512)),
              IsInvalid("granularity_bytes"));
  EXPECT_THAT(PinnedAllocator::Create({}, std::make_shared<FakeSource>(3 * 4096)),
              IsInvalid("granularity_bytes is 12288"));
  options_.segment_bytes = 4097;
  EXPECT_THAT(PinnedAllocator::Create(options_, source_), IsInvalid("segment_bytes"));
  options_ = {};
  options_.max_wait_for_deferred = absl::Seconds(-1);
  EXPECT_THAT(PinnedAllocator::Create(options_, source_), IsInvalid("max_wait_for_deferred"));
}

// Returns memory with another size or alignment than requested, or none.
class WrongSource final : public HostMemorySource {
 public:
  WrongSource(uint64_t address, uint64_t more_bytes) : address_(address), more_bytes_(more_bytes) {}
  std::string name() const override { return "wrong"; }
  bool pinned() const override { return true; }
  uint64_t granularity_bytes() const override { return 4096; }
  absl::StatusOr<HostSegment> Allocate(uint64_t size_bytes) override {
    ++in_use;
    return HostSegment{reinterpret_cast<void*>(address_), size_bytes + more_bytes_, 0};
  }
  absl::Status Free(const HostSegment& segment) override {
    EXPECT_EQ(segment.data, reinterpret_cast<void*>(address_));
    if (fails_to_free) return absl::UnavailableError("not freed");
    --in_use;
    return absl::OkStatus();
  }

  int in_use = 0;
  bool fails_to_free = false;

 private:
  const uint64_t address_;
  const uint64_t more_bytes_;
};

TEST(WrongSourceTest, ASourceThatGivesOtherMemoryThanAskedForIsNamedAndGetsItBack) {
  constexpr uint64_t kAddress = uint64_t{1} << 40;
  const FakeHost host;
  for (const auto& [address, more_bytes] :
       {std::pair(kAddress, 4096), std::pair(kAddress + 512, 0), std::pair(uint64_t{0}, 0)}) {
    const auto source = std::make_shared<WrongSource>(address, more_bytes);
    AllocatorOptions options;
    options.max_locked_bytes = options.segment_bytes = 4 * kMiB;
    const auto allocator = PinnedAllocator::Create(options, source, host.Probe()).value();
    for (int i = 0; i < 2; ++i) {  // the limit has room for one segment
      source->in_use = 0;
      EXPECT_THAT(allocator->Allocate(2 * kMiB),
                  IsInternalError("wrong returned", "aligned to 4096",
                                  "a source without memory returns ResourceExhausted"));
      EXPECT_EQ(source->in_use, address == 0 ? 1 : 0) << "there is nothing to free at null";
    }
    EXPECT_EQ(allocator->GetStats().locked_bytes.current, 0u);
    EXPECT_EQ(allocator->GetStats().pin_failures, 2u);
    EXPECT_EQ(allocator->GetStats().leaked_bytes, 0u);
  }
}

TEST(WrongSourceTest, OtherMemoryThanAskedForThatIsNotFreedIsReportedAsLeaked) {
  const FakeHost host;
  const auto source = std::make_shared<WrongSource>(uint64_t{1} << 40, 4096);
  source->fails_to_free = true;
  AllocatorOptions options;
  options.segment_bytes = 4 * kMiB;
  const auto allocator = PinnedAllocator::Create(options, source, host.Probe()).value();
  const CapturedLog log;
  EXPECT_THAT(allocator->Allocate(2 * kMiB), IsInternalError("wrong returned"));
  EXPECT_EQ(allocator->GetStats().leaked_bytes, 4 * kMiB + 4096);
  EXPECT_THAT(log.text(), HasSubstr("which is leaked"));
}

TEST_F(PinnedAllocatorTest, ABlockKnowsItsSizes) {
  const PinnedBlock block = Take(100000);
  EXPECT_FALSE(block.empty());
  EXPECT_EQ(block.size_bytes(), 100000u);
  EXPECT_GE(block.capacity_bytes(), 100000u);
  EXPECT_EQ(block.numa_node(), 3);
  std::memset(block.data(), 1, block.size_bytes());
}

TEST_F(PinnedAllocatorTest, SizesOfZeroAndBeyondAnyHostAreRefused) {
  EXPECT_THAT(allocator_->Allocate(0), IsInvalid());
  EXPECT_THAT(allocator_->Allocate(UINT64_MAX), IsInvalid());
  EXPECT_EQ(Stats().failures, 2u);
  // A valid size that no host can serve.
  EXPECT_THAT(allocator_->Allocate(uint64_t{1} << 47), IsExhausted());
}

TEST_F(PinnedAllocatorTest, BlocksAreAlignedToPagesFrom32KiBOnElseToTheSmallestBlock) {
  std::vector<PinnedBlock> blocks;
  for (uint64_t size = 1; size < 8 * kMiB; size = size * 5 / 3 + 1) {
    blocks.push_back(Take(size));
    const uint64_t alignment = size < 32 * kKiB ? config::kMinBlockBytes : 4 * kKiB;
    EXPECT_EQ(reinterpret_cast<uintptr_t>(blocks.back().data()) % alignment, 0u) << size;
  }
}

TEST_F(PinnedAllocatorTest, OnlyALimitThatAdmitsNoSegmentIsRefusedByName) {
  options_.max_locked_bytes = 4096;
  EXPECT_THAT(PinnedAllocator::Create(options_, source_), IsOk());
  options_.max_locked_bytes = 4095;
  EXPECT_THAT(PinnedAllocator::Create(options_, source_),
              IsInvalid("max_locked_bytes is 4095; nothing could be allocated: it must be "
                        "at least the granularity of fake, 4096"));
}

// With a limit below the granularity every allocation would fail.
TEST_F(PinnedAllocatorTest, ALimitBelowTwoMebibytesIsRefusedWithMappedMemory) {
  PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<MmapSource> source, MmapSource::Create());
  options_.max_locked_bytes = kMiB;
  EXPECT_THAT(PinnedAllocator::Create(options_, source, host_.Probe()),
              IsInvalid("max_locked_bytes is 1048576;",
                        "at least the granularity of mmap, 2097152 (2 MiB), or "
                        "pageable_fallback be set"));
  options_.max_locked_bytes = 2 * kMiB;
  MakeOver(source);
  const PinnedBlock block = Take(kMiB);
}

TEST_F(PinnedAllocatorTest, ALargerAlignmentHoldsForAllButSmallBlocks) {
  options_.alignment_bytes = 64 * kKiB;
  EXPECT_THAT(PinnedAllocator::Create(options_, source_), IsInvalid("granularity of fake"));
  const auto source = std::make_shared<FakeSource>(64 * kKiB);
  MakeOver(source);
  std::vector<PinnedBlock> blocks;
  for (uint64_t size = 32 * kKiB; size < 2 * kMiB; size = size * 5 / 3 + 1) {
    blocks.push_back(Take(size));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(blocks.back().data()) % (64 * kKiB), 0u) << size;
  }
  EXPECT_LE(Take(100).capacity_bytes(), 4 * kKiB);
  blocks.clear();
  allocator_.reset();
  EXPECT_EQ(source->outstanding_bytes(), 0u);
}

TEST_F(PinnedAllocatorTest, ABlockThatCameBackIsUsedAgainUnderANewId) {
  PinnedBlock block = Take(kMiB);
  void* const data = block.data();
  const uint64_t id = block.id();
  block = PinnedBlock();
  block = Take(kMiB);
  EXPECT_EQ(block.data(), data);
  EXPECT_NE(block.id(), id);
  EXPECT_EQ(Stats().hits, 1u);
  EXPECT_EQ(Stats().misses, 1u);
  EXPECT_EQ(Stats().pin_calls, 1u);
}

// Each allocator has a range of ids. Skipping ids would run into another allocator's range.
TEST_F(PinnedAllocatorTest, IdsOfAnAllocatorRise) {
  const uint64_t first = Take(kMiB).id();
  EXPECT_EQ(Take(kMiB).id(), first + 1);
}

TEST_F(PinnedAllocatorTest, NoTwoAllocatorsGiveTheSameId) {
  uint64_t id = Take(kKiB).id();
  const std::shared_ptr<PinnedAllocator> first = std::move(allocator_);
  Make();
  const uint64_t other = Take(kKiB).id();
  ASSERT_NE(id, other);
  // Small blocks, because hardened builds write and check every byte.
  do {
    id = first->Allocate(kKiB).value().id();
    ASSERT_NE(id, other);
  } while (id < other + 10'000);
}

TEST_F(PinnedAllocatorTest, AnAllocatorThatGivesAllBackEndsWithoutAWord) {
  Take(kMiB);
  const CapturedLog log;
  allocator_.reset();
  EXPECT_EQ(log.text(), "");
}

TEST_F(PinnedAllocatorTest, ABlockThatWasMovedFromIsEmpty) {
  PinnedBlock block = Take(kMiB);
  const PinnedBlock other = std::move(block);
  EXPECT_TRUE(block.empty());
  EXPECT_EQ(block.data(), nullptr);
  EXPECT_EQ(block.size_bytes(), 0u);
  EXPECT_EQ(block.id(), 0u);
}

TEST_F(PinnedAllocatorTest, ABlockThatIsAssignedToItselfStays) {
  PinnedBlock block = Take(kMiB);
  PinnedBlock& same = block;
  const uint64_t id = block.id();
  block = std::move(same);
  EXPECT_EQ(block.id(), id);
  EXPECT_EQ(Stats().requested_bytes.current, kMiB);
}

TEST_F(PinnedAllocatorTest, AnAssignmentReleasesWhatWasThere) {
  PinnedBlock block = Take(kMiB);
  block = Take(2 * kMiB - kSlack);
  EXPECT_EQ(Stats().requested_bytes.current, 2 * kMiB - kSlack);
}

TEST_F(PinnedAllocatorTest, StatisticsAreExact) {
  const PinnedBlock a = Take(kMiB - kSlack);
  PinnedBlock b = Take(kMiB - kSlack);
  std::move(b).ReleaseAfter({timeline_->Ticket(1)});
  EXPECT_EQ(Stats().requested_bytes.current, kMiB - kSlack);
  EXPECT_EQ(Stats().requested_bytes.peak, 2 * (kMiB - kSlack));
  EXPECT_EQ(Stats().booked_bytes.current, kMiB);
  EXPECT_EQ(Stats().booked_bytes.peak, 2 * kMiB);
  EXPECT_EQ(Stats().deferred_bytes.current, kMiB);
  EXPECT_EQ(Stats().used_bytes.current, 2 * kMiB);
  EXPECT_EQ(Stats().cached_bytes.current, 2 * kMiB);
  EXPECT_EQ(Stats().locked_bytes.current, 4 * kMiB);
  EXPECT_THAT(CheckInvariants(Stats()), IsOk());
}

TEST_F(PinnedAllocatorTest, CachedBytesAddUpToAllThatEverBecameFree) {
  Take(kMiB - kSlack);
  EXPECT_EQ(Stats().cached_bytes.total, 4 * kMiB) << "the rest of the segment, too";
  Take(kMiB - kSlack);
  EXPECT_EQ(Stats().cached_bytes.total, 5 * kMiB);
}

TEST_F(PinnedAllocatorTest, PeaksAreThoseOfTheMomentsBetweenRiseAndFall) {
  PinnedBlock a = Take(kMiB - kSlack);
  PinnedBlock b = Take(2 * kMiB - kSlack);
  a = PinnedBlock();
  a = Take(kMiB / 2 - kSlack);
  a = PinnedBlock();
  b = PinnedBlock();  // now all 4 MiB are cached
  b = Take(kMiB - kSlack);
  EXPECT_EQ(Stats().requested_bytes.peak, 3 * kMiB - 2 * kSlack);
  EXPECT_EQ(Stats().booked_bytes.peak, 3 * kMiB);
  EXPECT_EQ(Stats().used_bytes.peak, 3 * kMiB);
  EXPECT_EQ(Stats().cached_bytes.peak, 4 * kMiB);
  ASSERT_EQ(Stats().size_buckets.size(), 3u);
  EXPECT_EQ(Stats().size_buckets[1].booked_bytes.peak, kMiB);
  EXPECT_EQ(Stats().size_buckets[1].booked_bytes.total, 2 * kMiB);
}

TEST_F(PinnedAllocatorTest, TheLongestPinAndTheSumOfAllAreKept) {
  source_->on_allocate = [] { absl::SleepFor(absl::Milliseconds(2)); };
  const PinnedBlock first = Take(4 * kMiB - kSlack);
  const AllocatorStats one = Stats();
  EXPECT_GE(one.max_pin_ms, 2);
  EXPECT_EQ(one.pin_ms, one.max_pin_ms);
  const PinnedBlock second = Take(4 * kMiB - kSlack);
  const AllocatorStats two = Stats();
  EXPECT_GE(two.pin_ms, one.pin_ms + 2);
  EXPECT_NEAR(two.max_pin_ms, std::max(one.max_pin_ms, two.pin_ms - one.pin_ms), 1e-6);
}

TEST_F(PinnedAllocatorTest, TheLongestUnpinAndTheSumOfAllAreKept) {
  Take(4 * kMiB - kSlack);
  EXPECT_THAT(allocator_->Trim(0), IsOk());
  const AllocatorStats one = Stats();
  EXPECT_GT(one.max_unpin_ms, 0);
  EXPECT_EQ(one.unpin_ms, one.max_unpin_ms);
  TakeMany(2, 4 * kMiB - kSlack);
  EXPECT_THAT(allocator_->Trim(0), IsOk());
  const AllocatorStats stats = Stats();
  EXPECT_EQ(stats.unpin_calls, 3u);
  EXPECT_GT(stats.unpin_ms, one.unpin_ms);
  EXPECT_GE(stats.max_unpin_ms, one.max_unpin_ms);
  EXPECT_GT(stats.unpin_ms, stats.max_unpin_ms);
}

TEST_F(PinnedAllocatorTest, StatisticsAreKeptPerSizeAndPerNumaNode) {
  const PinnedBlock a = Take(kMiB - kSlack);
  const PinnedBlock b = Take(kMiB + 300 * kKiB);
  Take(100 * kKiB);
  ASSERT_EQ(Stats().size_buckets.size(), 2u);
  EXPECT_EQ(Stats().size_buckets[0].from_bytes, 64 * kKiB);
  EXPECT_EQ(Stats().size_buckets[0].allocations, 1u);
  EXPECT_EQ(Stats().size_buckets[0].misses, 0u);
  EXPECT_EQ(Stats().size_buckets[0].booked_bytes.current, 0u);
  EXPECT_EQ(Stats().size_buckets[1].from_bytes, kMiB);
  EXPECT_EQ(Stats().size_buckets[1].allocations, 2u);
  EXPECT_EQ(Stats().size_buckets[1].misses, 1u);
  EXPECT_EQ(Stats().size_buckets[1].booked_bytes.current, Stats().booked_bytes.current);
  ASSERT_EQ(Stats().numa_nodes.size(), 1u);
  EXPECT_EQ(Stats().numa_nodes[0].numa_node, 3);
  EXPECT_EQ(Stats().numa_nodes[0].segments, 1u);
  EXPECT_EQ(Stats().numa_nodes[0].used_bytes, Stats().booked_bytes.current);
}

TEST_F(PinnedAllocatorTest, ItOwnsWhatItHoldsInUseOrNot) {
  const int foreign = 0;
  EXPECT_FALSE(allocator_->Owns(&foreign));
  std::optional<PinnedBlock> block = Take(kMiB - kSlack);
  const char* const data = static_cast<const char*>(block->data());
  EXPECT_TRUE(allocator_->Owns(data));
  block.reset();
  EXPECT_TRUE(allocator_->Owns(data));
  EXPECT_TRUE(allocator_->Owns(data + 4 * kMiB - 1));
  EXPECT_FALSE(allocator_->Owns(data + 4 * kMiB));
  EXPECT_FALSE(allocator_->Owns(&foreign));
  EXPECT_THAT(allocator_->Trim(0), IsOk());
  EXPECT_FALSE(allocator_->Owns(data));
}

TEST_F(PinnedAllocatorTest, ABlockOutlivesItsAllocator) {
  PinnedBlock block = Take(kMiB);
  const PinnedBlock other = Take(5 * kMiB);
  const PinnedBlock small = Take(100);
  allocator_.reset();
  std::memset(block.data(), 7, block.size_bytes());
  EXPECT_GT(source_->outstanding_bytes(), 0u);
}

TEST_F(PinnedAllocatorTest, FreeSegmentsGoWithTheAllocatorAndTheRestWithTheLastBlock) {
  std::optional<PinnedBlock> block = Take(kMiB);
  Take(8 * kMiB);
  allocator_.reset();
  EXPECT_EQ(source_->outstanding_bytes(), 4 * kMiB);
  block.reset();
  EXPECT_EQ(source_->outstanding_bytes(), 0u);
}

}  // namespace
}  // namespace pinion
