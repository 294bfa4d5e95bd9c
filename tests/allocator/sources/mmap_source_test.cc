#include "pinion/allocator/sources/mmap_source.h"

#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/allocator/sources/numa.h"
#include "pinion/tests/support/captured_log.h"
#include "pinion/tests/support/child_process.h"
#include "pinion/tests/support/fake_numa_calls.h"
#include "pinion/tests/support/real_host_probe.h"
#include "pinion/tests/support/status_matchers.h"
#include "pinion/tests/support/status_says.h"

// Replaces the C library's madvise: one kind of advice fails on request.
namespace {
int failing_advice = -1;
int error_of_madvise = 0;
// Called for each range that is touched, if set.
std::function<void(void* data, size_t size_bytes)> on_touch;
}  // namespace

extern "C" int madvise(void* data, size_t size_bytes, int advice) noexcept {
  if (advice == failing_advice) {
    errno = error_of_madvise;
    return -1;
  }
  if (advice == MADV_POPULATE_WRITE && on_touch) on_touch(data, size_bytes);
  return static_cast<int>(syscall(SYS_madvise, data, size_bytes, advice));
}

namespace pinion {
namespace {

using ::pinion::testing::CapturedLog;
using ::pinion::testing::ChildProcess;
using ::pinion::testing::FakeNumaCalls;
using ::pinion::testing::IsExhausted;
using ::pinion::testing::IsFailedPrecondition;
using ::pinion::testing::IsInternalError;
using ::pinion::testing::IsInvalid;
using ::pinion::testing::IsOk;
using ::pinion::testing::kRealNumaRoot;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

// Sources of the segments below, by address.
std::map<void*, std::shared_ptr<MmapSource>> sources;

HostSegment Segment(const MmapOptions& options, uint64_t size_bytes) {
  std::shared_ptr<MmapSource> source = MmapSource::Create(options).value();
  const HostSegment segment = source->Allocate(size_bytes).value();
  sources[segment.data] = std::move(source);
  return segment;
}

void Free(const HostSegment& segment) {
  EXPECT_THAT(sources.extract(segment.data).mapped()->Free(segment), IsOk());
}

uint64_t ResidentBytes(const HostSegment& segment) {
  const uint64_t page_bytes = sysconf(_SC_PAGESIZE);
  std::vector<unsigned char> resident(segment.size_bytes / page_bytes);
  EXPECT_EQ(mincore(segment.data, segment.size_bytes, resident.data()), 0);
  return page_bytes *
         std::count_if(resident.begin(), resident.end(), [](unsigned char c) { return c & 1; });
}

// Returns the VmFlags of the mapping that contains `data`, e.g. " rd wr mr mw me dc hg ".
std::string VmFlags(const void* data) {
  std::ifstream smaps("/proc/self/smaps");
  std::string line;
  bool inside = false;
  while (std::getline(smaps, line)) {
    unsigned long long begin = 0;
    unsigned long long end = 0;
    if (std::sscanf(line.c_str(), "%llx-%llx ", &begin, &end) == 2) {
      const auto address = reinterpret_cast<uintptr_t>(data);
      inside = begin <= address && address < end;
    }
    if (inside && line.rfind("VmFlags:", 0) == 0) return line.substr(8) + " ";
  }
  return "";
}

// Returns the process's reserved and used address space in pages.
uint64_t PagesOfAddresses() {
  uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages;
}

constexpr char kLimited[] = "the tests run with ulimit -v, where no addresses are set aside";

bool AddressesAreLimited() {
  rlimit limit = {};
  EXPECT_EQ(getrlimit(RLIMIT_AS, &limit), 0);
  return limit.rlim_cur != RLIM_INFINITY;
}

// Maps other memory at the segment's address if nothing is mapped there.
void* MapAt(const HostSegment& segment) {
  return mmap(segment.data, segment.size_bytes, PROT_READ | PROT_WRITE,
              MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
}

TEST(MmapSourceTest, SegmentsAreAlignedToHugePagesAndZero) {
  for (const uint64_t size_bytes : {2 * kMiB, 6 * kMiB}) {
    const HostSegment segment = Segment({}, size_bytes);
    EXPECT_EQ(segment.size_bytes, size_bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(segment.data) % (2 * kMiB), 0u);
    const char* const bytes = static_cast<const char*>(segment.data);
    EXPECT_TRUE(std::all_of(bytes, bytes + size_bytes, [](char c) { return c == 0; }));
    std::memset(segment.data, 1, size_bytes);
    Free(segment);
  }
}

TEST(MmapSourceTest, NothingButTheSegmentStaysMapped) {
  const HostSegment segment = Segment({}, 2 * kMiB);
  char* const data = static_cast<char*>(segment.data);
  Free(segment);
  EXPECT_EQ(msync(data, 2 * kMiB, MS_ASYNC), -1);
  EXPECT_EQ(errno, ENOMEM);
}

TEST(MmapSourceTest, EveryPageIsThereHoweverManyThreadsTouchThem) {
  for (const int threads : {1, 3, 64}) {
    SCOPED_TRACE(threads);
    const HostSegment segment = Segment({.touch_threads = threads}, 14 * kMiB);
    EXPECT_EQ(ResidentBytes(segment), segment.size_bytes);
    Free(segment);
  }
}

// TensorRT-LLM touches all pages by one thread (TensorRT-LLM#15430).
// The order of threads is random. So each thread waits until the requested number of threads have
// arrived, and then long enough that one more would be seen.
TEST(MmapSourceTest, AsManyThreadsTouchAsWereAskedFor) {
  for (const size_t threads : {1, 2, 3}) {
    std::mutex mu;
    std::condition_variable changed;
    std::set<std::thread::id> seen;
    std::chrono::milliseconds patience(10'000);
    on_touch = [&](void*, size_t) {
      std::unique_lock lock(mu);
      seen.insert(std::this_thread::get_id());
      changed.notify_all();
      if (!changed.wait_for(lock, patience, [&] { return seen.size() >= threads; })) patience = {};
      changed.wait_for(lock, std::chrono::milliseconds(20), [&] { return seen.size() > threads; });
    };
    Free(Segment({.touch_threads = static_cast<int>(threads)}, 10 * kMiB));
    on_touch = nullptr;
    EXPECT_EQ(seen.size(), threads);
    EXPECT_EQ(seen.count(std::this_thread::get_id()), 1u) << "the caller is one of them";
  }
}

TEST(MmapSourceTest, WhatIsTouchedAtATimeIsAHugePageOfTheSegment) {
  std::mutex mu;
  std::vector<std::pair<void*, size_t>> intervals;
  on_touch = [&](void* data, size_t size_bytes) {
    const std::lock_guard lock(mu);
    intervals.emplace_back(data, size_bytes);
  };
  const HostSegment segment = Segment({.touch_threads = 2}, 6 * kMiB);
  on_touch = nullptr;
  char* const data = static_cast<char*>(segment.data);
  EXPECT_THAT(intervals, UnorderedElementsAre(Pair(data, 2 * kMiB), Pair(data + 2 * kMiB, 2 * kMiB),
                                              Pair(data + 4 * kMiB, 2 * kMiB)));
  Free(segment);
}

class FailingAdvice {
 public:
  FailingAdvice(int advice, int error) {
    failing_advice = advice;
    error_of_madvise = error;
  }
  ~FailingAdvice() { failing_advice = -1; }
};

// Linux before 5.14 has no MADV_POPULATE_WRITE.
TEST(MmapSourceTest, EveryPageIsThereWhereTheKernelCannotPopulateThem) {
  const FailingAdvice failing(MADV_POPULATE_WRITE, EINVAL);
  const HostSegment segment = Segment({.touch_threads = 2}, 6 * kMiB);
  EXPECT_EQ(ResidentBytes(segment), segment.size_bytes);
  Free(segment);
}

TEST(MmapSourceTest, WhatTheKernelRefusesIsNamedAndTheAddressesGoBack) {
  const auto source = MmapSource::Create({.touch_threads = 2}).value();
  {
    const FailingAdvice failing(MADV_POPULATE_WRITE, ENOMEM);
    EXPECT_THAT(source->Allocate(6 * kMiB), IsExhausted("touching the pages of 6 MiB"));
  }
  const HostSegment segment = source->Allocate(2 * kMiB).value();
  EXPECT_THAT(source->Free(segment), IsOk());
  {
    const FailingAdvice failing(MADV_DONTFORK, EINVAL);
    EXPECT_THAT(source->Allocate(2 * kMiB), IsInternalError("madvise(MADV_DONTFORK)"));
  }
  const HostSegment again = source->Allocate(2 * kMiB).value();
  EXPECT_EQ(again.data, segment.data);
  EXPECT_THAT(source->Free(again), IsOk());
}

TEST(MmapSourceTest, WhatCannotBeUnmappedIsAnErrorAndMayBeFreedAgain) {
  if (AddressesAreLimited()) GTEST_SKIP() << kLimited;
  ChildProcess child([] {
    const auto source = MmapSource::Create().value();
    const HostSegment segment = source->Allocate(2 * kMiB).value();
    rlimit before = {};
    ASSERT_EQ(getrlimit(RLIMIT_AS, &before), 0);
    const rlimit none = {1, before.rlim_max};  // every call of mmap fails
    ASSERT_EQ(setrlimit(RLIMIT_AS, &none), 0);
    const absl::Status freed = source->Free(segment);
    ASSERT_EQ(setrlimit(RLIMIT_AS, &before), 0);
    EXPECT_THAT(freed, IsInternalError("unmapping 2 MiB at"));
    EXPECT_THAT(source->Free(segment), IsOk());
  });
  EXPECT_EQ(child.Wait(), 0);
}

TEST(MmapSourceTest, OnlyASegmentInUseIsFreedAndOnlyOnce) {
  const auto source = MmapSource::Create().value();
  const auto other = MmapSource::Create().value();
  const HostSegment segment = source->Allocate(4 * kMiB).value();
  const HostSegment freed = source->Allocate(4 * kMiB).value();
  const HostSegment foreign = other->Allocate(4 * kMiB).value();
  ASSERT_THAT(source->Free(freed), IsOk());
  char* const data = static_cast<char*>(segment.data);
  for (const HostSegment& wrong :
       {HostSegment{}, freed, foreign, HostSegment{data, 2 * kMiB}, HostSegment{data, 6 * kMiB},
        HostSegment{data + 2 * kMiB, 2 * kMiB}, HostSegment{data + 1, 4 * kMiB}}) {
    const auto address = absl::StrCat("0x", absl::Hex(reinterpret_cast<uintptr_t>(wrong.data)));
    EXPECT_THAT(
        source->Free(wrong),
        IsInvalid(HumanBytes(wrong.size_bytes) + " in use at " + address, "unchanged and once"));
  }
  EXPECT_EQ(msync(foreign.data, foreign.size_bytes, MS_ASYNC), 0) << "it was unmapped";
  const HostSegment next = source->Allocate(4 * kMiB).value();
  const HostSegment after = source->Allocate(4 * kMiB).value();
  EXPECT_NE(next.data, after.data) << "the same addresses were handed out twice";
  for (const HostSegment& own : {segment, next, after}) EXPECT_THAT(source->Free(own), IsOk());
  EXPECT_THAT(other->Free(foreign), IsOk());
}

TEST(MmapSourceTest, UntouchedPagesLieOnNoNodeAndComeWithTheirFirstUse) {
  const HostSegment segment = Segment({.touch_threads = 0}, 4 * kMiB);
  EXPECT_EQ(segment.numa_node, -1);
  EXPECT_EQ(ResidentBytes(segment), 0u);
  static_cast<char*>(segment.data)[3 * kMiB] = 1;
  EXPECT_GT(ResidentBytes(segment), 0u);
  Free(segment);
}

// Segments are adjacent within the reserved address range.
TEST(MmapSourceTest, SegmentsLieSideBySideHoweverManyGibibytesTheyAre) {
  if (AddressesAreLimited()) GTEST_SKIP() << kLimited;
  const auto source = MmapSource::Create({.touch_threads = 0}).value();
  EXPECT_TRUE(source->JoinsAt(nullptr)) << "wherever they touch";
  std::vector<HostSegment> segments;
  for (int i = 0; i < 5; ++i) segments.push_back(source->Allocate(kGiB).value());
  char* const first = static_cast<char*>(segments.front().data);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(segments[i].data, first + i * kGiB) << "segment " << i;
  for (const HostSegment& segment : segments) EXPECT_THAT(source->Free(segment), IsOk());
}

TEST(MmapSourceTest, WhereAddressesAreLimitedSegmentsAreAlignedAllTheSame) {
  if (AddressesAreLimited()) GTEST_SKIP() << kLimited;
  ChildProcess child([] {
    const rlimit limit = {uint64_t{1} << 60, uint64_t{1} << 60};
    ASSERT_EQ(setrlimit(RLIMIT_AS, &limit), 0);
    const auto source = MmapSource::Create({.touch_threads = 0}).value();
    for (int i = 0; i < 3; ++i) {
      const uint64_t pages = PagesOfAddresses();
      const HostSegment segment = source->Allocate(2 * kMiB).value();
      if (i > 0) {  // the first cycle may grow the heap
        EXPECT_EQ(PagesOfAddresses(), pages + 2 * kMiB / sysconf(_SC_PAGESIZE));
      }
      char* const data = static_cast<char*>(segment.data);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % (2 * kMiB), 0u);
      data[0] = data[2 * kMiB - 1] = 1;
      EXPECT_THAT(source->Free(segment), IsOk());
      EXPECT_EQ(msync(data, 2 * kMiB, MS_ASYNC), -1) << "it is still mapped";
      // Occupies the gap, so that the next segment is not aligned by luck.
      mmap(nullptr, 5 * kMiB + 12 * kKiB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    }
  });
  EXPECT_EQ(child.Wait(), 0);
}

// After fork(), copy-on-write would give the parent other pages than the device writes to.
TEST(MmapSourceTest, AChildDoesNotInheritASegment) {
  const HostSegment segment = Segment({}, 2 * kMiB);
  EXPECT_THAT(VmFlags(segment.data), HasSubstr(" dc "));
  // The child may have mapped something else at this address, but not the segment.
  ChildProcess child([&] { EXPECT_THAT(VmFlags(segment.data), Not(HasSubstr(" dc "))); });
  EXPECT_EQ(child.Wait(), 0);
  Free(segment);
}

// The child may have mapped its own memory at the segment's address.
TEST(MmapSourceTest, AChildThatFreesAnInheritedSegmentUnmapsNothing) {
  const auto source = MmapSource::Create().value();
  const HostSegment segment = source->Allocate(2 * kMiB).value();
  ChildProcess child([&] {
    EXPECT_EQ(MapAt(segment), segment.data);
    EXPECT_THAT(source->Free(segment), IsOk());
    EXPECT_EQ(msync(segment.data, segment.size_bytes, MS_ASYNC), 0) << "it is not mapped any more";
  });
  EXPECT_EQ(child.Wait(), 0);
  EXPECT_THAT(source->Free(segment), IsOk());
}

TEST(MmapSourceTest, AChildDoesNotInheritTheAddressesOfAFreedSegment) {
  const auto source = MmapSource::Create().value();
  const HostSegment segment = source->Allocate(2 * kMiB).value();
  EXPECT_THAT(source->Free(segment), IsOk());
  ChildProcess child(
      [&] { EXPECT_EQ(MapAt(segment), segment.data) << "something is mapped there"; });
  EXPECT_EQ(child.Wait(), 0);
}

TEST(MmapSourceTest, AChildMakesASourceOfItsOwn) {
  const auto source = MmapSource::Create().value();
  ChildProcess child([&] {
    EXPECT_THAT(source->Allocate(2 * kMiB), IsFailedPrecondition("before fork()"));
    Free(Segment({}, 2 * kMiB));
  });
  EXPECT_EQ(child.Wait(), 0);
}

TEST(MmapSourceTest, HugePagesAreAskedForOnlyWhenTheOptionSaysSo) {
  if (!std::ifstream("/sys/kernel/mm/transparent_hugepage/enabled")) {
    GTEST_SKIP() << "this kernel has no transparent huge pages";
  }
  const HostSegment plain = Segment({}, 2 * kMiB);
  EXPECT_THAT(VmFlags(plain.data), Not(HasSubstr(" hg ")));
  const HostSegment huge = Segment({.huge_pages = true}, 2 * kMiB);
  EXPECT_THAT(VmFlags(huge.data), HasSubstr(" hg "));
  Free(plain);
  Free(huge);
}

TEST(MmapSourceTest, ASegmentKnowsTheNodeThatHoldsIt) {
  const HostSegment segment = Segment({}, 4 * kMiB);
  const NumaNodeSet nodes = ReadNumaNodes(std::string(kRealNumaRoot) + "has_memory");
  if (segment.numa_node < 0 || nodes != 1) {
    GTEST_SKIP() << "the kernel does not tell, or there are several nodes: " << NumaNodeList(nodes);
  }
  EXPECT_EQ(segment.numa_node, 0);
  Free(segment);
}

// Where the pages then lie is the kernel's choice: another node, if that one is full.
TEST(MmapSourceTest, TheKernelIsToldTheNodeBeforeAPageIsTouched) {
  if (!CheckNumaNode(0).ok()) GTEST_SKIP() << CheckNumaNode(0);
  FakeNumaCalls calls;
  std::atomic<int> touched_since = 0;
  on_touch = [&](void*, size_t) { touched_since += calls.mbind_bytes == 4 * kMiB ? 1 : 0; };
  const HostSegment segment = Segment({.numa_node = 0, .touch_threads = 2}, 4 * kMiB);
  on_touch = nullptr;
  EXPECT_EQ(touched_since, 2);
  EXPECT_THAT(calls.mbind_nodes, ElementsAre(0));
  EXPECT_EQ(ResidentBytes(segment), segment.size_bytes);
  Free(segment);
}

// Docker's default seccomp filter forbids the call.
TEST(MmapSourceTest, WhereTheChoiceOfANodeIsForbiddenMemoryComesFromAnyAndTheLogSaysSoOnce) {
  if (!CheckNumaNode(0).ok()) GTEST_SKIP() << CheckNumaNode(0);
  // The log line appears once per process, so the test needs a process of its own.
  ChildProcess child([] {
    const CapturedLog log;
    FakeNumaCalls calls;
    for (const int error : {EPERM, ENOSYS}) {
      calls.error = error;
      const HostSegment segment = Segment({.numa_node = 0}, 2 * kMiB);
      EXPECT_EQ(ResidentBytes(segment), segment.size_bytes);
      Free(segment);
    }
    EXPECT_EQ(calls.count, 2);
    EXPECT_THAT(log.text(), AllOf(HasSubstr("mbind: Operation not permitted"),
                                  HasSubstr("CAP_SYS_NICE"), Not(HasSubstr("not implemented"))));
  });
  EXPECT_EQ(child.Wait(), 0);
}

TEST(MmapSourceTest, ANodeThatTheCpusetHasLostIsAnErrorWithTheRemedy) {
  if (!CheckNumaNode(0).ok()) GTEST_SKIP() << CheckNumaNode(0);
  FakeNumaCalls calls;
  calls.error = EINVAL;
  EXPECT_THAT(MmapSource::Create({.numa_node = 0}).value()->Allocate(2 * kMiB),
              IsFailedPrecondition("mbind to NUMA node 0", "set numa_node to -1"));
}

TEST(MmapSourceTest, TheCallersThreadMayRunWhereItRanBefore) {
  cpu_set_t before;
  cpu_set_t after;
  ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  {
    const ScopedNumaThread near(0);
    cpu_set_t inside;
    ASSERT_EQ(sched_getaffinity(0, sizeof(inside), &inside), 0);
    cpu_set_t both;
    CPU_AND(&both, &inside, &before);
    EXPECT_TRUE(CPU_EQUAL(&both, &inside)) << "a CPU that the program was kept from";
  }
  ASSERT_EQ(sched_getaffinity(0, sizeof(after), &after), 0);
  EXPECT_TRUE(CPU_EQUAL(&before, &after));
}

TEST(MmapSourceTest, ANodeThatDoesNotExistIsRefused) {
  EXPECT_THAT(MmapSource::Create({.numa_node = 4095}), IsInvalid("numa_node is 4095"));
  EXPECT_THAT(MmapSource::Create({.numa_node = -2}), IsInvalid("numa_node is -2"));
  EXPECT_EQ(MmapOptions().numa_node, -1) << "no node is asked for by default";
}

TEST(MmapSourceTest, ThreadsAreFrom0To1024) {
  EXPECT_THAT(MmapSource::Create({.touch_threads = -1}), IsInvalid("touch_threads is -1"));
  EXPECT_THAT(MmapOptions{.touch_threads = 0}.Validate(), IsOk());
  EXPECT_THAT(MmapOptions{.touch_threads = 1024}.Validate(), IsOk());
  EXPECT_THAT(MmapOptions{.touch_threads = 1025}.Validate(), Not(IsOk()));
}

TEST(MmapSourceTest, WhatTheSystemRefusesIsResourceExhausted) {
  for (const uint64_t size_bytes : {uint64_t{1} << 60, UINT64_MAX - 2 * kMiB + 1}) {
    EXPECT_THAT(MmapSource::Create().value()->Allocate(size_bytes),
                IsExhausted("Cannot allocate memory"));
  }
}

TEST(MmapSourceTest, ALimitOfAddressSpaceIsNamedAsTheRemedy) {
  ChildProcess child([] {
    const rlim_t limit_bytes = PagesOfAddresses() * sysconf(_SC_PAGESIZE) + 256 * kMiB;
    const rlimit limit = {limit_bytes, limit_bytes};
    ASSERT_EQ(setrlimit(RLIMIT_AS, &limit), 0);
    EXPECT_THAT(MmapSource::Create().value()->Allocate(kGiB), IsExhausted("1 GiB", "ulimit -v"));
  });
  EXPECT_EQ(child.Wait(), 0);
}

}  // namespace
}  // namespace pinion
