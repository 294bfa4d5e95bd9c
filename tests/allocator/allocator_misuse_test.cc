// Wrong uses of the allocator. Each ends in an error that names the value and the remedy, and
// leaves nothing behind. tests/misuse.md lists all such tests.

#include <sys/mman.h>

#include <climits>
#include <cstdint>
#include <limits>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/fence.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/allocator/ram/host_ledger.h"
#include "pinion/allocator/ram/ram_probe.h"
#include "pinion/allocator/sources/numa.h"
#include "pinion/allocator/sources/page_lock.h"
#include "pinion/tests/allocator/pinned_allocator_fixture.h"
#include "pinion/tests/support/fake_host.h"
#include "pinion/tests/support/status_matchers.h"
#include "pinion/tests/support/status_says.h"

namespace pinion {
namespace allocator_misuse_test {

using ::pinion::testing::FakeHost;
using ::pinion::testing::IsExhausted;
using ::pinion::testing::IsInvalid;
using ::pinion::testing::IsOk;
using ::pinion::testing::PinnedAllocatorFixture;
using ::pinion::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

using AllocatorMisuseTest = PinnedAllocatorFixture;

TEST_F(AllocatorMisuseTest, AReserveThatHasNoRoomIsRefusedAndTakesNothing) {
  host_.Write("proc/self/cgroup", "0::/pod\n");
  host_.Write("cgroup/pod/memory.max", std::to_string(50 * kGiB));
  host_.Write("cgroup/pod/memory.current", "0\n");
  const struct {
    const char* name;
    uint64_t size_bytes;
    absl::StatusCode code;
    const char* limit;
  } rows[] = {
      {"the largest number", UINT64_MAX, absl::StatusCode::kInvalidArgument, "at most 2^47"},
      {"one byte too many", (uint64_t{1} << 47) + 1, absl::StatusCode::kInvalidArgument,
       "at most 2^47"},
      {"more than addresses", uint64_t{1} << 47, absl::StatusCode::kResourceExhausted,
       "max_locked_bytes, 80 GiB"},
      {"more than the limit", 80 * kGiB + 1, absl::StatusCode::kResourceExhausted,
       "max_locked_bytes, 80 GiB"},
      {"more than the host's RAM", 70 * kGiB, absl::StatusCode::kResourceExhausted,
       "above high_percent (50)"},
      {"more than the cgroup's", 30 * kGiB, absl::StatusCode::kResourceExhausted,
       "does not fit the 25 GiB"},
  };
  options_.max_locked_bytes = 80 * kGiB;
  options_.high_percent = options_.warn_percent = 50;
  options_.low_percent = 40;
  Make();
  for (const auto& row : rows) {
    EXPECT_THAT(allocator_->Reserve(row.size_bytes),
                StatusIs(row.code, AllOf(HasSubstr("cannot reserve"),
                                         HasSubstr(std::to_string(row.size_bytes) + " bytes"),
                                         HasSubstr(row.limit))))
        << row.name;
  }
  EXPECT_EQ(source_->calls(), 0u);
  EXPECT_EQ(Stats().limit_refusals, 2u);
  EXPECT_EQ(Stats().watermark_refusals, 2u);
}

// Segments that are already pinned count: only the missing bytes must fit the limit.
TEST_F(AllocatorMisuseTest, AReserveUpToTheLimitIsServed) {
  MakeWithLimit(8 * kMiB);
  EXPECT_THAT(allocator_->Reserve(0), IsOk());
  EXPECT_THAT(allocator_->Reserve(5 * kMiB), IsOk());
  EXPECT_THAT(allocator_->Reserve(8 * kMiB), IsOk());
  EXPECT_THAT(allocator_->Reserve(8 * kMiB), IsOk());
  EXPECT_EQ(source_->outstanding_bytes(), 8 * kMiB);
}

TEST(HostLedgerMisuseTest, AnEmptyDirectoryIsRefusedWithTheRemedy) {
  EXPECT_THAT(HostLedger::InDirectory(""), IsInvalid("the ledger is \"\"", "/run/pinion"));
}

TEST(RamProbeMisuseTest, APercentageThatIsNoneIsNamed) {
  const RamProbe probe = FakeHost().Probe();
  for (const double percent : {-1.0, 100.5, std::numeric_limits<double>::infinity(),
                               std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_DEATH((void)probe.Sample(percent), "of each limit; it must lie between 0 and 100");
  }
  EXPECT_EQ(probe.Sample(0).limited_by, probe.Sample(100).limited_by);
}

TEST(RamProbeMisuseTest, ReadingsThatAreNoNumbersAreUnknown) {
  FakeHost host;
  host.Write("proc/self/cgroup", "0::/pod\n");
  for (const std::string text : {"nan", "inf", "-nan", "x", ""}) {
    host.Write("proc/meminfo", "MemTotal: " + text + " kB\nMemAvailable: " + text + " kB\n");
    host.Write("cgroup/pod/memory.max", text + "\n");
    host.Write("cgroup/pod/memory.current", text + "\n");
    const RamSample sample = host.Probe().Sample();
    EXPECT_EQ(sample.total_bytes, 0u) << text;
    EXPECT_EQ(sample.percent, 0) << text;
    EXPECT_EQ(sample.headroom_bytes, UINT64_MAX) << text;
    EXPECT_EQ(sample.limited_by, "") << text;
  }
}

TEST(FenceTicketMisuseTest, ATicketOfNoTimelineIsDoneHoweverLargeItsNumber) {
  for (const uint64_t value : {uint64_t{0}, UINT64_MAX}) {
    const FenceTicket none = {nullptr, value};
    EXPECT_TRUE(none.IsDone());
    for (const absl::Duration timeout : {-absl::InfiniteDuration(), absl::InfiniteDuration()}) {
      EXPECT_THAT(none.Wait(timeout), IsOk());
    }
  }
}

TEST(NumaMisuseTest, ANodeOrAStrideThatThereIsNotIsNamed) {
  char page[1];
  for (const int node : {-1, -64, 1024, INT_MIN, INT_MAX}) {
    EXPECT_THAT(PreferNumaNode(page, 1, node), IsInvalid("PreferNumaNode " + std::to_string(node) +
                                                         "; it must lie between 0 and 1023"));
    const ScopedNumaThread anywhere(node, "/no/such/directory/");
  }
  EXPECT_DEATH((void)NumaNodeOf(page, 1, 0), "stride_bytes is 0");
  EXPECT_EQ(NumaNodeOf(nullptr, 1, 1), -1);
  EXPECT_EQ(NumaNodeOf(page, uint64_t{1} << 50, 1), -1);
  EXPECT_EQ(NumaNodeOf(page, UINT64_MAX, 4096), -1);
  EXPECT_EQ(NumaNodeOf(page, 1, UINT64_MAX), NumaNodeOf(page, 1, 1));
}

TEST(PageLockMisuseTest, MemoryAndFlagsThatThereAreNotAreNamed) {
  constexpr uint64_t kBytes = 4096;
  EXPECT_THAT(LockPages(nullptr, kBytes, 0), IsInvalid("4 KiB at 0 with", "memory that is mapped"));
  void* const data =
      mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(data, MAP_FAILED);
  EXPECT_THAT(LockPages(data, kBytes, 6), IsInvalid("flags 6", "0 or MLOCK_ONFAULT"));
  ASSERT_EQ(munmap(data, kBytes), 0);
  EXPECT_THAT(LockPages(data, kBytes, 0), IsExhausted("not all of it is mapped"));
}

TEST(PinnedBlockMisuseTest, AnEmptyBlockIsOfNoSizeAndOnNoNode) {
  const PinnedBlock empty;
  EXPECT_TRUE(empty.empty());
  EXPECT_EQ(empty.data(), nullptr);
  EXPECT_EQ(empty.size_bytes(), 0u);
  EXPECT_EQ(empty.id(), 0u);
  EXPECT_EQ(empty.capacity_bytes(), 0u);
  EXPECT_EQ(empty.numa_node(), -1);
  EXPECT_FALSE(empty.pinned());
}

TEST(LogSinkMisuseTest, ASinkThatIsNullIsStandardError) {
  const LogSink before = SetLogSink(nullptr);
  ::testing::internal::CaptureStderr();
  PINION_LOG(kError) << "to nobody";
  const std::string text = ::testing::internal::GetCapturedStderr();
  SetLogSink(before);
  EXPECT_THAT(text, HasSubstr("to nobody"));
}

}  // namespace allocator_misuse_test
}  // namespace pinion
