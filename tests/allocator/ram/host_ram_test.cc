// Which ledger an allocator opens, in a process that has no shared memory.

#include "pinion/allocator/ram/host_ram.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/tests/support/captured_log.h"
#include "pinion/tests/support/fake_source.h"
#include "pinion/tests/support/status_matchers.h"

// The C library's, as in a container without /dev/shm.
namespace {
int ledgers_opened = 0;
}  // namespace

extern "C" int shm_open(const char*, int flags, mode_t) {
  // Ledgers that others have left in /dev/shm are opened as well, and not created.
  if ((flags & O_CREAT) != 0) ++ledgers_opened;
  errno = ENOENT;
  return -1;
}

namespace pinion {
namespace {

using ::pinion::testing::CapturedLog;
using ::pinion::testing::FakeSource;
using ::pinion::testing::IsOk;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

class HostRamTest : public ::testing::Test {
 protected:
  HostRamTest() { ledgers_opened = 0; }

  AllocatorOptions options_;
  const std::shared_ptr<FakeSource> source_ = std::make_shared<FakeSource>();
  const CapturedLog log_;
};

// Its processes do know of each other.
TEST_F(HostRamTest, AnAllocatorWithADirectoryForItsLedgerOpensNoOtherOneAndSaysNothing) {
  const std::string directory = absl::StrCat(::testing::TempDir(), "host_ram_", getpid());
  std::filesystem::create_directories(directory);
  options_.ledger_directory = directory;
  EXPECT_THAT(PinnedAllocator::Create(options_, source_), IsOk());
  std::filesystem::remove_all(directory);
  EXPECT_EQ(ledgers_opened, 0);
  EXPECT_THAT(log_.text(), IsEmpty());
}

TEST_F(HostRamTest, OptionsThatAreRefusedOpenNoLedger) {
  options_.high_percent = 0;
  EXPECT_THAT(PinnedAllocator::Create(options_, source_), Not(IsOk()));
  EXPECT_EQ(ledgers_opened, 0);
}

TEST_F(HostRamTest, WithoutADirectoryTheLedgerOfThisUserIsOpenedAndWhoHasNoneIsTold) {
  EXPECT_THAT(PinnedAllocator::Create(options_, source_), IsOk());
  EXPECT_EQ(ledgers_opened, 1);
  EXPECT_THAT(log_.text(), HasSubstr("do not know of each other's growth"));
}

}  // namespace
}  // namespace pinion
