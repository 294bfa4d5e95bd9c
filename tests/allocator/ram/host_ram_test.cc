// Which ledger an allocator opens, in a process that has no shared memory.

// With the fortified header, open is an inline function that nobody can replace.
#undef _FORTIFY_SOURCE

#include "pinion/allocator/ram/host_ram.h"

#include <fcntl.h>

#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <memory>
#include <string_view>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/allocator/ram/ram_probe.h"
#include "pinion/tests/support/captured_log.h"
#include "pinion/tests/support/fake_host.h"
#include "pinion/tests/support/fake_source.h"
#include "pinion/tests/support/roomy_host.h"
#include "pinion/tests/support/status_matchers.h"

// The C library's, as in a container without /dev/shm.
namespace {
int ledgers_opened = 0;
}  // namespace

extern "C" int open(const char* path, int flags, ...) {
  if (std::string_view(path).starts_with("/dev/shm/pinion_ledger_")) {
    ++ledgers_opened;
    errno = ENOENT;
    return -1;
  }
  std::va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & (O_CREAT | __O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  return pinion::testing::OpenOnRoomyHost(path, flags, mode);
}

namespace pinion {
namespace {

using ::pinion::testing::CapturedLog;
using ::pinion::testing::FakeHost;
using ::pinion::testing::FakeSource;
using ::pinion::testing::IsOk;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

class HostRamTest : public ::testing::Test {
 protected:
  HostRamTest() { ledgers_opened = 0; }

  void Grow() {
    const auto allocator = PinnedAllocator::Create(options_, source_);
    ASSERT_THAT(allocator, IsOk());
    EXPECT_THAT((*allocator)->Allocate(1), IsOk());
  }

  AllocatorOptions options_;
  const std::shared_ptr<FakeSource> source_ = std::make_shared<FakeSource>();
  const CapturedLog log_;
};

// Allocators would otherwise log how much of this machine's RAM other programs use.
TEST_F(HostRamTest, TheTestFindsARoomyHostAlthoughItReplacesOpen) {
  const RamSample sample = RamProbe().Sample();
  EXPECT_EQ(sample.total_bytes, uint64_t{1} << 40);
  EXPECT_EQ(sample.percent, 0);
  EXPECT_EQ(sample.headroom_bytes, sample.total_bytes);
}

// Its processes do know of each other.
TEST_F(HostRamTest, AnAllocatorWithADirectoryForItsLedgerOpensNoOtherOneAndSaysNothing) {
  const FakeHost host;
  options_.ledger_directory = host.root().string();
  Grow();
  EXPECT_EQ(ledgers_opened, 0);
  EXPECT_THAT(log_.text(), IsEmpty());
}

TEST_F(HostRamTest, OptionsThatAreRefusedOpenNoLedger) {
  options_.high_percent = 0;
  EXPECT_THAT(PinnedAllocator::Create(options_, source_), Not(IsOk()));
  EXPECT_EQ(ledgers_opened, 0);
}

TEST_F(HostRamTest, WithoutADirectoryTheLedgerOfThisUserIsOpenedAndWhoHasNoneIsTold) {
  Grow();
  EXPECT_GE(ledgers_opened, 1);
  EXPECT_THAT(log_.text(), HasSubstr("not coordinated with other Pinion processes"));
}

}  // namespace
}  // namespace pinion
