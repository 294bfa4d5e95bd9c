// Detection of misused blocks. Most checks exist in hardened builds only.

#include "pinion/allocator/heap/hardening.h"

#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/heap/block_records.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/allocator/pool/segment_pool.h"
#include "pinion/config/build_config.h"
#include "pinion/tests/support/fake_host.h"
#include "pinion/tests/support/fake_source.h"
#include "pinion/tests/support/fake_timeline.h"

namespace pinion {
namespace {

using config::kHardened;
using ::pinion::testing::FakeHost;
using ::pinion::testing::FakeSource;
using ::pinion::testing::FakeTimeline;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

class HardeningTest : public ::testing::Test {
 protected:
  HardeningTest() {
    ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
    AllocatorOptions options;
    options.segment_bytes = kMiB;
    allocator_ =
        PinnedAllocator::Create(options, std::make_shared<FakeSource>(), FakeHost().Probe())
            .value();
  }

  PinnedBlock Take(uint64_t size_bytes) { return allocator_->Allocate(size_bytes).value(); }

  std::shared_ptr<PinnedAllocator> allocator_;
};

using HardeningDeathTest = HardeningTest;

// Destroys the block twice through a bytewise copy: the type itself prevents a double release.
void ReleaseTwice(PinnedBlock block) {
  alignas(PinnedBlock) unsigned char bytes[sizeof(PinnedBlock)];
  std::memcpy(bytes, static_cast<void*>(&block), sizeof(block));
  block = PinnedBlock();
  reinterpret_cast<PinnedBlock*>(bytes)->~PinnedBlock();
}

// Holds in every build. GetStats enters buffered releases, and so finds the second one.
TEST_F(HardeningDeathTest, ABlockThatIsReleasedTwiceIsNamedWithTheRemedy) {
  const auto release_twice = [this] {
    ReleaseTwice(Take(1000));
    (void)allocator_->GetStats();
  };
  // The message does not call the block pinned, because pageable blocks take the same path.
  EXPECT_DEATH(
      release_twice(),
      AllOf(ContainsRegex("block [0-9]+.* is released, but it is not live: it was released before.*"
                          "copied byte by byte or destroyed twice"),
            Not(HasSubstr("pinned"))));
}

TEST_F(HardeningDeathTest, ABlockThatIsReleasedTwiceIsNamedThoughItsBytesWereJoinedWithOthers) {
  if (!kHardened) GTEST_SKIP() << "only in hardened builds";
  const auto release_twice = [this] {
    const PinnedBlock before = Take(40000);
    ReleaseTwice(Take(40000));  // merges with the free bytes behind it
  };
  EXPECT_DEATH(release_twice(),
               "block [0-9]+ \\(40000 bytes at 0x[0-9a-f]+\\) is released, but it is not");
}

TEST_F(HardeningDeathTest, ASecondReleaseWithATicketIsFoundToo) {
  const auto release_twice = [this] {
    const auto timeline = std::make_shared<FakeTimeline>();
    PinnedBlock block = Take(1000);
    alignas(PinnedBlock) unsigned char bytes[sizeof(PinnedBlock)];
    std::memcpy(bytes, static_cast<void*>(&block), sizeof(block));
    std::move(block).ReleaseAfter({timeline->Ticket(1)});
    std::move(*reinterpret_cast<PinnedBlock*>(bytes)).ReleaseAfter({timeline->Ticket(1)});
    (void)allocator_->GetStats();
  };
  EXPECT_DEATH(release_twice(),
               "block [0-9]+ \\(1000 bytes at 0x[0-9a-f]+\\) is released, "
               "but it is not live");
}

TEST_F(HardeningDeathTest, ReleaseAfterOnAnEmptyBlockDies) {
  EXPECT_DEATH(PinnedBlock().ReleaseAfter({}), "ReleaseAfter on an empty block");
}

TEST_F(HardeningDeathTest, AWriteBeyondTheEndIsFoundAtTheRelease) {
  if (!kHardened) GTEST_SKIP() << "only in hardened builds";
  for (const uint64_t size_bytes : {uint64_t{1}, uint64_t{256}, 64 * kKiB}) {
    const auto overflow = [&] {
      PinnedBlock block = Take(size_bytes);
      static_cast<char*>(block.data())[size_bytes + 5] = 0;
    };
    EXPECT_DEATH(overflow(),
                 absl::StrCat("block [0-9]+ \\(", size_bytes,
                              " bytes at 0x[0-9a-f]+\\) was written to beyond its end, at byte ",
                              size_bytes + 5, ".*allocate all bytes that are written"));
  }
}

TEST_F(HardeningDeathTest, AWriteBeyondTheEndIsFoundWhenTheTicketIsDone) {
  if (!kHardened) GTEST_SKIP() << "only in hardened builds";
  const auto overflow = [this] {
    const auto timeline = std::make_shared<FakeTimeline>();
    PinnedBlock block = Take(64 * kKiB);
    char* const data = static_cast<char*>(block.data());
    std::move(block).ReleaseAfter({timeline->Ticket(1)});
    data[64 * kKiB] = 0;  // a copy that writes past the block
    timeline->CompleteVisibly(1);
    EXPECT_TRUE(allocator_->Trim(0).ok());
  };
  EXPECT_DEATH(overflow(), "written to beyond its end, at byte 65536");
}

// A pinned cache recorded the event after the block was back on its free list, and a copy overwrote
// the next owner's data (NVIDIA/cub#156).
TEST_F(HardeningDeathTest, AWriteToFreeMemoryIsFoundWhenItIsUsedAgain) {
  if (!kHardened) GTEST_SKIP() << "only in hardened builds";
  const auto write_after_release = [this] {
    PinnedBlock block = Take(64 * kKiB);
    char* const data = static_cast<char*>(block.data());
    block = PinnedBlock();  // omits the ticket of the copy below
    data[77] = 1;
    Take(64 * kKiB);
  };
  EXPECT_DEATH(write_after_release(),
               "block [0-9]+ \\(65536 bytes at 0x[0-9a-f]+\\) was written to after its "
               "release, at 0x[0-9a-f]+ \\(found when it became block [0-9]+\\).*ReleaseAfter");
}

TEST_F(HardeningDeathTest, AWriteToFreeMemoryIsFoundWhenItsSegmentGoesBack) {
  if (!kHardened) GTEST_SKIP() << "only in hardened builds";
  const auto write_after_release = [this] {
    PinnedBlock block = Take(64 * kKiB);
    char* const data = static_cast<char*>(block.data());
    block = PinnedBlock();
    data[77] = 1;
    EXPECT_TRUE(allocator_->Trim(0).ok());
  };
  EXPECT_DEATH(write_after_release(),
               "\\(65536 bytes at 0x[0-9a-f]+\\) was written to after its "
               "release.*found when its segment was given back");
}

// No check detects a read, but the pattern makes the wrong value recognizable.
TEST_F(HardeningTest, AReadOfFreeMemoryOrOfWhatWasNeverWrittenGetsThePattern) {
  if (!kHardened) GTEST_SKIP() << "only in hardened builds";
  PinnedBlock block = Take(64 * kKiB);
  const auto* const bytes = static_cast<const unsigned char*>(block.data());
  EXPECT_EQ(bytes[0], internal::kFreePattern);
  EXPECT_EQ(bytes[64 * kKiB], internal::kRedZonePattern);
  std::memset(block.data(), 7, block.size_bytes());
  block = PinnedBlock();
  EXPECT_EQ(bytes[0], internal::kFreePattern);
  EXPECT_EQ(bytes[64 * kKiB - 1], internal::kFreePattern);
}

TEST_F(HardeningTest, OrdinaryUseTripsNothing) {
  for (uint64_t size_bytes = 1; size_bytes < 3 * kMiB; size_bytes = size_bytes * 3 / 2 + 1) {
    const PinnedBlock block = Take(size_bytes);
    std::memset(block.data(), 0, size_bytes);
  }
  EXPECT_EQ(allocator_->GetStats().requested_bytes.current, 0u);
}

}  // namespace
}  // namespace pinion
