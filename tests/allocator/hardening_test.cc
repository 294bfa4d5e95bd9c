// What hardened builds find. Elsewhere only the checks of the books are left.

#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "gtest/gtest.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/allocator/pinned_block.h"
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

TEST_F(HardeningDeathTest, ABlockThatIsReleasedTwiceIsNamed) {
  const auto release_twice = [this] {
    PinnedBlock block = Take(1000);
    // Only a copy behind the type's back can be released twice.
    alignas(PinnedBlock) unsigned char bytes[sizeof(PinnedBlock)];
    std::memcpy(bytes, static_cast<void*>(&block), sizeof(block));
    block = PinnedBlock();
    reinterpret_cast<PinnedBlock*>(bytes)->~PinnedBlock();
  };
  EXPECT_DEATH(release_twice(), "pinned block [0-9]+ is released, but it is not live");
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
    EXPECT_DEATH(overflow(), "written to beyond its end, at byte");
  }
}

TEST_F(HardeningDeathTest, AWriteBeyondTheEndIsFoundWhenTheTicketIsDone) {
  if (!kHardened) GTEST_SKIP() << "only in hardened builds";
  const auto overflow = [this] {
    const auto timeline = std::make_shared<FakeTimeline>();
    PinnedBlock block = Take(64 * kKiB);
    char* const data = static_cast<char*>(block.data());
    std::move(block).ReleaseAfter({timeline->Ticket(1)});
    data[64 * kKiB] = 0;  // the copy, which is too long
    timeline->CompleteVisibly(1);
    Take(1000);
  };
  EXPECT_DEATH(overflow(), "written to beyond its end, at byte 65536");
}

// A pinned cache recorded the event after the block was back on its list, and a copy wrote to
// whoever got the block next (NVIDIA/cub#156).
TEST_F(HardeningDeathTest, AWriteToFreeMemoryIsFoundWhenItIsUsedAgain) {
  if (!kHardened) GTEST_SKIP() << "only in hardened builds";
  const auto write_after_release = [this] {
    PinnedBlock block = Take(64 * kKiB);
    char* const data = static_cast<char*>(block.data());
    block = PinnedBlock();  // without the ticket of the copy below
    data[77] = 1;
    Take(64 * kKiB);
  };
  EXPECT_DEATH(write_after_release(), "\\+ 77 was written to after its block was released");
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
