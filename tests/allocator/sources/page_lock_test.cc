// Memory locked by mlock2 under process limits, without a GPU.

#include "pinion/allocator/sources/page_lock.h"

#include <fcntl.h>
#include <linux/capability.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/allocator_stats.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/allocator/ram/host_ram.h"
#include "pinion/allocator/sources/mmap_source.h"
#include "pinion/tests/support/captured_log.h"
#include "pinion/tests/support/child_process.h"
#include "pinion/tests/support/fake_host.h"
#include "pinion/tests/support/status_matchers.h"
#include "pinion/tests/support/status_says.h"

// Replaces C library functions that the source calls: mlock2 fails on request.
namespace {
int error_of_mlock2 = 0;
unsigned failing_flags = 0;
// The value that readlink() returns for /proc/self/ns/user.
std::string user_namespace = "user:[4026531837]";
}  // namespace

extern "C" int mlock2(const void* data, size_t size_bytes, unsigned flags) noexcept {
  if (error_of_mlock2 != 0 && flags == failing_flags) {
    errno = error_of_mlock2;
    return -1;
  }
  return static_cast<int>(syscall(SYS_mlock2, data, size_bytes, flags));
}

// The sanitizers' munlock does nothing.
extern "C" int munlock(const void* data, size_t size_bytes) noexcept {
  return static_cast<int>(syscall(SYS_munlock, data, size_bytes));
}

extern "C" ssize_t readlink(const char* path, char* buffer, size_t size_bytes) noexcept {
  if (std::string(path) == "/proc/self/ns/user") {
    return static_cast<ssize_t>(user_namespace.copy(buffer, size_bytes));
  }
  return syscall(SYS_readlinkat, AT_FDCWD, path, buffer, size_bytes);
}

namespace pinion {
namespace {

using ::pinion::testing::CapturedLog;
using ::pinion::testing::ChildProcess;
using ::pinion::testing::FakeHost;
using ::pinion::testing::IsExhausted;
using ::pinion::testing::IsOk;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Matcher;
using ::testing::Not;

// Lets this process lock at most `bytes` from here on, as a user without privileges.
void LimitLocking(uint64_t bytes) {
  const rlimit limit = {bytes, bytes};
  ASSERT_EQ(setrlimit(RLIMIT_MEMLOCK, &limit), 0);
  __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct capabilities[2] = {};
  ASSERT_EQ(syscall(SYS_capget, &header, capabilities), 0);
  for (auto* set : {&capabilities[0].effective, &capabilities[0].permitted}) {
    *set &= ~(1u << CAP_IPC_LOCK);
  }
  ASSERT_EQ(syscall(SYS_capset, &header, capabilities), 0);
}

// Exit status of a child that cannot run the test here.
constexpr int kCannotBeTried = 77;

// Returns whether this process has CAP_IPC_LOCK, possibly in a user namespace only.
bool HasCapability() {
  __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct capabilities[2] = {};
  EXPECT_EQ(syscall(SYS_capget, &header, capabilities), 0);
  return (capabilities[0].effective & 1u << CAP_IPC_LOCK) != 0;
}

uint64_t KibibytesAfter(std::istream& file, const std::string& name) {
  uint64_t kib = 0;
  for (std::string word; file >> word;) {
    if (word == name && file >> kib) return kib;
  }
  return 0;
}

// Returns VmLck of /proc/self/status: the bytes that count against the limit.
uint64_t CountedBytes() {
  std::ifstream status("/proc/self/status");
  return KibibytesAfter(status, "VmLck:") * kKiB;
}

// Returns Locked of /proc/self/smaps: the pages that are present and locked.
uint64_t LockedBytes(const void* data) {
  std::ifstream smaps("/proc/self/smaps");
  for (std::string line; std::getline(smaps, line);) {
    unsigned long long begin = 0;
    unsigned long long end = 0;
    if (std::sscanf(line.c_str(), "%llx-%llx ", &begin, &end) != 2) continue;
    const auto address = reinterpret_cast<uintptr_t>(data);
    if (begin <= address && address < end) return KibibytesAfter(smaps, "Locked:") * kKiB;
  }
  return 0;
}

uint64_t ResidentBytes(const HostSegment& segment) {
  const uint64_t page_bytes = sysconf(_SC_PAGESIZE);
  std::vector<unsigned char> resident(segment.size_bytes / page_bytes);
  EXPECT_EQ(mincore(segment.data, segment.size_bytes, resident.data()), 0);
  return page_bytes *
         std::count_if(resident.begin(), resident.end(), [](unsigned char c) { return c & 1; });
}

class PageLockTest : public ::testing::Test {
 protected:
  void SetUp() override {
    rlimit limit = {};
    getrlimit(RLIMIT_MEMLOCK, &limit);
    if (limit.rlim_max < 8 * kMiB) GTEST_SKIP() << "less than 8 MiB may be locked here";
  }
};

void InAChild(const std::function<void()>& body) {
  ChildProcess child(body);
  EXPECT_EQ(child.Wait(), 0);
}

TEST_F(PageLockTest, EveryPageOfALockedSegmentIsThereAndLockedUntilItIsFreed) {
  for (const int touch_threads : {0, 1, 2}) {
    SCOPED_TRACE(touch_threads);
    InAChild([&] {
      LimitLocking(8 * kMiB);
      const auto source = MmapSource::Create({.touch_threads = touch_threads, .lock = true});
      ASSERT_THAT(source, IsOk());
      const absl::StatusOr<HostSegment> segment = (*source)->Allocate(4 * kMiB);
      ASSERT_THAT(segment, IsOk());
      EXPECT_EQ(ResidentBytes(*segment), 4 * kMiB);
      EXPECT_EQ(LockedBytes(segment->data), 4 * kMiB);
      EXPECT_EQ(CountedBytes(), 4 * kMiB);
      EXPECT_THAT((*source)->Free(*segment), IsOk());
      EXPECT_EQ(CountedBytes(), 0u);
    });
  }
}

TEST_F(PageLockTest, PlainMappedMemoryIsNotLockedAndNotCalledSo) {
  InAChild([] {
    LimitLocking(0);
    const auto source = MmapSource::Create({}).value();
    EXPECT_EQ(source->name(), "mmap");
    EXPECT_FALSE(source->pinned());
    AllocatorOptions options;
    options.max_locked_bytes = 4 * kMiB;
    const auto allocator = PinnedAllocator::Create(options, source, FakeHost().Probe()).value();
    const PinnedBlock block = allocator->Allocate(3 * kMiB).value();
    EXPECT_FALSE(block.pinned());
    EXPECT_EQ(CountedBytes(), 0u);
    EXPECT_THAT(allocator->Allocate(3 * kMiB),
                IsExhausted("of pageable memory: to take 4 MiB more",
                            "4 MiB are held: ", Not(HasSubstr("pinned"))));
    const std::string stats = allocator->GetStats().ToString();
    EXPECT_THAT(stats, AllOf(HasSubstr("held 4 MiB"), Not(HasSubstr("locked"))));
  });
}

TEST_F(PageLockTest, WhereRamIsShortPlainMappedMemoryIsNotCalledPinnedEither) {
  InAChild([] {
    FakeHost host;
    host.SetMeminfo(100 * kGiB, 12 * kGiB);
    const HostRam ram = host.Ram();
    const auto allocator = PinnedAllocator::Create({}, MmapSource::Create({}).value(), ram).value();
    const CapturedLog log;
    const PinnedBlock block = allocator->Allocate(3 * kMiB).value();
    EXPECT_THAT(log.text(), AllOf(HasSubstr("host memory is taken while RAM is short: 88.0 %"),
                                  Not(HasSubstr("pinned"))));
    const auto others = ram.ledger.Reserve(2 * kGiB);
    EXPECT_THAT(allocator->Allocate(3 * kGiB / 2),
                IsExhausted("of pageable memory: to take 1.5 GiB more", "2 GiB about to be taken",
                            "high_percent (90)", Not(HasSubstr("pinned"))));
  });
}

// As in a program for RDMA or io_uring without a GPU.
TEST_F(PageLockTest, BlocksOverALockingSourceArePinnedUpToTheLimitOfTheProcess) {
  InAChild([] {
    LimitLocking(4 * kMiB);
    const auto source = MmapSource::Create({.lock = true}).value();
    EXPECT_EQ(source->name(), "mlock");
    const auto allocator = PinnedAllocator::Create({}, source, FakeHost().Probe()).value();
    const PinnedBlock block = allocator->Allocate(3 * kMiB).value();
    EXPECT_TRUE(block.pinned());
    EXPECT_EQ(LockedBytes(block.data()), 4 * kMiB);
    EXPECT_THAT(allocator->Allocate(3 * kMiB),
                IsExhausted("of pinned memory: mlock failed to provide 4 MiB: mlock2 of 4 "
                            "MiB: Cannot allocate memory: RLIMIT_MEMLOCK is 4 MiB and 4 MiB "
                            "are locked already; raise it (ulimit -l",
                            "4 MiB are locked: "));
    EXPECT_EQ(CountedBytes(), 4 * kMiB) << "what was refused is unmapped";
    EXPECT_THAT(allocator->GetStats().ToString(), HasSubstr("locked 4 MiB"));
  });
}

TEST_F(PageLockTest, WhereNothingMayBeLockedTheFallbackServesAndSaysThatItIsNotPinned) {
  InAChild([] {
    LimitLocking(0);
    FakeHost host;
    host.SetMeminfo(100 * kGiB, 99 * kGiB);
    AllocatorOptions options;
    options.pageable_fallback = true;
    const auto allocator =
        PinnedAllocator::Create(options, MmapSource::Create({.lock = true}).value(), host.Probe());
    ASSERT_THAT(allocator, IsOk());
    const absl::StatusOr<PinnedBlock> block = (*allocator)->Allocate(kMiB);
    ASSERT_THAT(block, IsOk());
    EXPECT_FALSE(block->pinned());
    host.SetMeminfo(100 * kGiB, 12 * kGiB);
    const CapturedLog log;
    EXPECT_THAT((*allocator)->Allocate(100 * kMiB), IsOk());
    EXPECT_THAT(log.text(), AllOf(HasSubstr("RAM is short"), Not(HasSubstr("pinned"))));
  });
}

TEST_F(PageLockTest, ARefusalTouchesNoPage) {
  InAChild([] {
    LimitLocking(2 * kMiB);
    const auto source = MmapSource::Create({.lock = true}).value();
    rusage before = {};
    rusage after = {};
    getrusage(RUSAGE_SELF, &before);
    EXPECT_THAT(source->Allocate(kGiB), Not(IsOk()));
    getrusage(RUSAGE_SELF, &after);
    EXPECT_LT(after.ru_maxrss, before.ru_maxrss + static_cast<long>(64 * kMiB / kKiB));
  });
}

TEST_F(PageLockTest, EachRefusalIsToldApart) {
  struct Case {
    int error;
    const char* text;
  };
  for (const Case& c :
       {Case{EPERM, "a seccomp filter or a security module forbids it: RLIMIT_MEMLOCK is 8 MiB"},
        Case{EAGAIN, "check the free memory of the host"},
        Case{ENOMEM, "too many mappings (vm.max_map_count); RLIMIT_MEMLOCK is 8 MiB and"},
        Case{EINVAL, "Invalid argument: RLIMIT_MEMLOCK is 8 MiB"}}) {
    for (const unsigned flags : {0u, unsigned{MLOCK_ONFAULT}}) {
      SCOPED_TRACE(::testing::Message() << c.error << " of flags " << flags);
      InAChild([&] {
        LimitLocking(8 * kMiB);
        const auto source = MmapSource::Create({.lock = true}).value();
        error_of_mlock2 = c.error;
        failing_flags = flags;
        EXPECT_THAT(source->Allocate(2 * kMiB), IsExhausted("mlock2 of 2 MiB: ", c.text));
        EXPECT_EQ(CountedBytes(), 0u);
        error_of_mlock2 = 0;
        EXPECT_THAT(source->Allocate(2 * kMiB), IsOk());
      });
    }
  }
}

// The second mlock2 call populates pages that already count against the limit.
TEST_F(PageLockTest, TheLimitIsNotBlamedForBytesThatTheSameSegmentHasLocked) {
  InAChild([] {
    LimitLocking(8 * kMiB);
    const auto source = MmapSource::Create({.lock = true}).value();
    const HostSegment other = source->Allocate(2 * kMiB).value();
    error_of_mlock2 = ENOMEM;
    failing_flags = 0;
    EXPECT_THAT(source->Allocate(6 * kMiB),
                IsExhausted("too many mappings (vm.max_map_count); RLIMIT_MEMLOCK is 8 "
                            "MiB and 2 MiB are locked already",
                            Not(HasSubstr("raise it"))));
    EXPECT_THAT(source->Free(other), IsOk());
  });
}

// Expects `message` in a process with CAP_IPC_LOCK in `of_namespace` that cannot lock 4 MiB.
// RLIMIT_MEMLOCK is 2 MiB and mlock2 fails with `error`.
void ExpectOfTheCapable(const std::string& of_namespace, int error,
                        const Matcher<std::string>& message) {
  ChildProcess child([&] {
    const rlimit limit = {2 * kMiB, 8 * kMiB};
    ASSERT_EQ(setrlimit(RLIMIT_MEMLOCK, &limit), 0);
    if (!HasCapability() && unshare(CLONE_NEWUSER) != 0) _exit(kCannotBeTried);
    ASSERT_TRUE(HasCapability());
    user_namespace = of_namespace;
    error_of_mlock2 = error;
    failing_flags = MLOCK_ONFAULT;
    const auto segment = MmapSource::Create({.lock = true}).value()->Allocate(4 * kMiB);
    EXPECT_THAT(std::string(segment.status().message()), message);
  });
  const int outcome = child.Wait();
  if (outcome == kCannotBeTried) GTEST_SKIP() << "no CAP_IPC_LOCK is to be had here";
  EXPECT_EQ(outcome, 0);
}

TEST_F(PageLockTest, TheLimitIsNotBlamedWhereACapabilityLiftsIt) {
  ExpectOfTheCapable("user:[4026531837]", ENOMEM,
                     AllOf(HasSubstr("too many mappings (vm.max_map_count); RLIMIT_MEMLOCK is no "
                                     "limit here and 0 B are locked already"),
                           Not(HasSubstr("raise it"))));
}

TEST_F(PageLockTest, WhoeverForbidsItWhereNoLimitHoldsIsNamed) {
  ExpectOfTheCapable("user:[4026531837]", EPERM,
                     AllOf(HasSubstr("a seccomp filter or a security module forbids it"),
                           Not(HasSubstr("raise it"))));
}

TEST_F(PageLockTest, ACapabilityInAUserNamespaceLiftsNoLimit) {
  ExpectOfTheCapable("user:[4026532209]", ENOMEM,
                     HasSubstr("RLIMIT_MEMLOCK is 2 MiB and 0 B are locked already; raise it"));
}

TEST_F(PageLockTest, ALimitOfZeroIsNamedWithItsRemedy) {
  InAChild([] {
    LimitLocking(0);
    EXPECT_THAT(MmapSource::Create({.lock = true}).value()->Allocate(2 * kMiB),
                IsExhausted("may lock nothing: RLIMIT_MEMLOCK is 0 B", "CAP_IPC_LOCK"));
  });
}

}  // namespace
}  // namespace pinion
