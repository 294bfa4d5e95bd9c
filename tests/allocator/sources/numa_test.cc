#include "pinion/allocator/sources/numa.h"

#include <dlfcn.h>
#include <linux/mempolicy.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/tests/support/captured_log.h"
#include "pinion/tests/support/child_process.h"
#include "pinion/tests/support/fake_host.h"
#include "pinion/tests/support/fake_numa_calls.h"
#include "pinion/tests/support/real_host_probe.h"
#include "pinion/tests/support/status_matchers.h"
#include "pinion/tests/support/status_says.h"

// Replaces the C library's sched_getaffinity: it can fail, with garbage in the set, as if the
// kernel had more CPUs than the set can hold. And sched_setaffinity, which can fail.
namespace {
bool cpus_do_not_fit = false;
int error_of_setaffinity = 0;
}  // namespace

extern "C" int sched_getaffinity(pid_t thread, size_t size_bytes, cpu_set_t* cpus) noexcept {
  static const auto next =
      reinterpret_cast<int (*)(pid_t, size_t, cpu_set_t*)>(dlsym(RTLD_NEXT, "sched_getaffinity"));
  if (!cpus_do_not_fit) return next(thread, size_bytes, cpus);
  std::memset(cpus, 0xff, size_bytes);
  errno = EINVAL;
  return -1;
}

extern "C" int sched_setaffinity(pid_t thread, size_t size_bytes, const cpu_set_t* cpus) noexcept {
  static const auto next = reinterpret_cast<int (*)(pid_t, size_t, const cpu_set_t*)>(
      dlsym(RTLD_NEXT, "sched_setaffinity"));
  if (error_of_setaffinity == 0) return next(thread, size_bytes, cpus);
  errno = error_of_setaffinity;
  return -1;
}

namespace pinion {
namespace {

using ::pinion::testing::CapturedLog;
using ::pinion::testing::ChildProcess;
using ::pinion::testing::FakeHost;
using ::pinion::testing::FakeNumaCalls;
using ::pinion::testing::IsFailedPrecondition;
using ::pinion::testing::IsInvalid;
using ::pinion::testing::IsOk;
using ::pinion::testing::kRealNumaRoot;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

std::vector<int> AllowedCpus() {
  cpu_set_t set;
  EXPECT_EQ(sched_getaffinity(0, sizeof(set), &set), 0);
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  }
  return cpus;
}

NumaNodeSet Nodes(std::initializer_list<int> numbers) {
  NumaNodeSet nodes;
  for (const int node : numbers) nodes.set(node);
  return nodes;
}

TEST(NumaTest, TheKernelsListsOfNodesAreReadAndWritten) {
  FakeHost host;
  const std::string file = (host.root() / "list").string();
  for (const std::string list : {"0", "0-2,5,8-9", "1,3", "1022-1023"}) {
    host.Write("list", list + "\n");
    EXPECT_EQ(NumaNodeList(ReadNumaNodes(file)), list);
  }
  host.Write("list", "0-2,5\n");
  EXPECT_EQ(ReadNumaNodes(file), Nodes({0, 1, 2, 5}));
  EXPECT_EQ(NumaNodeList({}), "none");
}

TEST(NumaTest, AFileThatIsMissingOrHoldsNoListNamesNoNode) {
  FakeHost host;
  EXPECT_EQ(ReadNumaNodes((host.root() / "list").string()), Nodes({}));
  for (const std::string list : {"none,0", "", "1024-1030"}) {
    host.Write("list", list + "\n");
    EXPECT_EQ(ReadNumaNodes((host.root() / "list").string()), Nodes({})) << list;
  }
}

TEST(NumaTest, TheNodesOfTheCpusetAreThoseThatTheKernelAllows) {
  FakeHost host;
  EXPECT_TRUE(NumaNodesOfCpuset(host.root().string()).all()) << "it does not tell";
  host.Write("self/status",
             "Name:\tx\nMems_allowed:\t00000002\nMems_allowed_list:\t1,3-4\nA:\t9\n");
  EXPECT_EQ(NumaNodesOfCpuset(host.root().string()), Nodes({1, 3, 4}));
}

// A thread may be in another cpuset than the process's first one.
TEST(NumaTest, TheNodesOfTheCpusetAreThoseOfTheCallingThread) {
  FakeHost host;
  host.Write("self/status", "Mems_allowed_list:\t0-3\n");
  host.Write("thread-self/status", "Mems_allowed_list:\t2\n");
  EXPECT_EQ(NumaNodesOfCpuset(host.root().string()), Nodes({2}));
}

TEST(NumaTest, OfAllPoliciesOnlyMpolBindLeavesNodesOut) {
  FakeNumaCalls calls;
  calls.policy_nodes = {1, 70};
  for (const int policy :
       std::initializer_list<int>{MPOL_DEFAULT, MPOL_PREFERRED, MPOL_INTERLEAVE, MPOL_LOCAL,
                                  MPOL_PREFERRED_MANY, /*MPOL_WEIGHTED_INTERLEAVE=*/6}) {
    calls.policy = policy;
    EXPECT_EQ(NumaNodesOfThread(Nodes({0, 1, 70})), Nodes({0, 1, 70})) << policy;
  }
  for (const int flags : {0, MPOL_F_STATIC_NODES, MPOL_F_NUMA_BALANCING}) {
    calls.policy = MPOL_BIND | flags;
    EXPECT_EQ(NumaNodesOfThread(Nodes({0, 1, 70})), Nodes({1, 70})) << flags;
    EXPECT_EQ(NumaNodesOfThread(Nodes({0, 1})), Nodes({1})) << flags;
  }
}

TEST(NumaTest, RelativeNodesAreCountedThroughTheAllowedOnes) {
  FakeNumaCalls calls;
  calls.policy = MPOL_BIND | MPOL_F_RELATIVE_NODES;
  calls.policy_nodes = {0, 4};
  EXPECT_EQ(NumaNodesOfThread(Nodes({2, 5, 9})), Nodes({2, 5}));
  EXPECT_EQ(NumaNodesOfThread({}), Nodes({}));
}

// The kernel does the same: mpol_rebind_nodemask.
TEST(NumaTest, ABindThatTheCpusetLeavesNoNodeOfDoesNotHold) {
  FakeNumaCalls calls;
  calls.policy = MPOL_BIND | MPOL_F_STATIC_NODES;
  calls.policy_nodes = {1};
  EXPECT_EQ(NumaNodesOfThread(Nodes({0, 2})), Nodes({0, 2}));
}

TEST(NumaTest, ANodeWhoseMemoryTheProcessMayNotUseIsRefusedWithTheRemedy) {
  FakeHost host;
  const std::string root = host.root().string();
  const auto check = [&](int node) { return CheckNumaNode(node, root + "/", root); };
  host.Write("has_memory", "0-2\n");
  host.Write("self/status", "Mems_allowed_list:\t0,2-3\n");
  for (const int node : {-1, 0, 2}) EXPECT_THAT(check(node), IsOk()) << node;
  EXPECT_THAT(check(1), IsInvalid("numa_node is 1; it must be -1", "(0,2)", "cpuset.mems"));
  for (const int node : {-2, 3, 1024, 100000}) {
    EXPECT_THAT(check(node), IsInvalid("(0,2)", Not(HasSubstr("cpuset")))) << node;
  }
  host.Write("has_memory", "");
  EXPECT_THAT(check(0), IsInvalid("(none)"));
}

class ScopedNumaThreadTest : public ::testing::Test {
 protected:
  ScopedNumaThreadTest() : before_(AllowedCpus()) {}
  ~ScopedNumaThreadTest() override { EXPECT_EQ(AllowedCpus(), before_); }

  // Adds a node with these CPUs and returns the root directory.
  std::string NodeOf(int node, const std::string& cpus) {
    host_.Write("node" + std::to_string(node) + "/cpulist", cpus + "\n");
    return host_.root().string() + "/";
  }

  FakeHost host_;
  const std::vector<int> before_;
};

TEST_F(ScopedNumaThreadTest, TheThreadRunsOnTheNodesCpusUntilTheScopeEnds) {
  if (before_.size() < 2) GTEST_SKIP() << "one CPU is no choice";
  for (const int node : {0, 3}) {
    const int cpu = before_.back();
    const std::string root = NodeOf(node, std::to_string(cpu));
    {
      const ScopedNumaThread near(node, root);
      EXPECT_EQ(AllowedCpus(), std::vector<int>{cpu});
    }
    EXPECT_EQ(AllowedCpus(), before_);
  }
}

TEST_F(ScopedNumaThreadTest, CpusThatTheProgramWasKeptFromStayForbidden) {
  if (before_.size() < 2) GTEST_SKIP() << "one CPU is no choice";
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(before_.front(), &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  {
    const ScopedNumaThread near(0, NodeOf(0, "0-1023,5000"));
    EXPECT_EQ(AllowedCpus(), std::vector<int>{before_.front()});
  }
  EXPECT_EQ(AllowedCpus(), std::vector<int>{before_.front()});
  cpu_set_t all;
  CPU_ZERO(&all);
  for (const int cpu : before_) CPU_SET(cpu, &all);
  ASSERT_EQ(sched_setaffinity(0, sizeof(all), &all), 0);
}

// The log line appears once per process, so the test needs a process of its own.
TEST_F(ScopedNumaThreadTest, ANodeWhoseCpusTheSystemForbidsIsNamedInTheLogOnce) {
  if (before_.back() == 1023) GTEST_SKIP() << "each CPU is allowed";
  ChildProcess child([&] {
    const CapturedLog log;
    for (const char* cpus : {"", "1023", "1023"}) {
      const ScopedNumaThread near(7, NodeOf(7, cpus));
      EXPECT_EQ(AllowedCpus(), before_);
      EXPECT_EQ(log.text().empty(), *cpus == '\0');
    }
    const std::string text = log.text(), told = "no CPU of NUMA node 7";
    EXPECT_THAT(text, AllOf(HasSubstr(told), HasSubstr("--cpuset-cpus")));
    EXPECT_EQ(text.find(told), text.rfind(told));
  });
  EXPECT_EQ(child.Wait(), 0);
}

TEST_F(ScopedNumaThreadTest, ACallThatTheSystemForbidsIsNamedInTheLogOnce) {
  for (const int error : {EPERM, ENOSYS}) {
    ChildProcess child([&] {
      const std::string root = NodeOf(0, std::to_string(before_.back()));
      const CapturedLog log;
      error_of_setaffinity = error;
      for (int i = 0; i < 2; ++i) const ScopedNumaThread near(0, root);
      error_of_setaffinity = 0;
      const std::string text = log.text(), told = "NUMA calls are forbidden here";
      EXPECT_THAT(text, AllOf(HasSubstr("sched_setaffinity: "), HasSubstr(told),
                              Not(HasSubstr("no CPU of NUMA node"))));
      EXPECT_EQ(text.find(told), text.rfind(told));
    });
    EXPECT_EQ(child.Wait(), 0) << std::strerror(error);
  }
}

TEST_F(ScopedNumaThreadTest, ANodeWithoutCpusOrNoNodeChangesNothing) {
  const ScopedNumaThread memory_only(1, NodeOf(1, ""));
  EXPECT_EQ(AllowedCpus(), before_);
  const ScopedNumaThread nowhere(-1, NodeOf(-1, std::to_string(before_.back())));
  EXPECT_EQ(AllowedCpus(), before_);
}

TEST_F(ScopedNumaThreadTest, WhereTheKernelDoesNotTellTheCpusTheThreadStaysWhereItIs) {
  if (before_.size() < 2) GTEST_SKIP() << "one CPU is no choice";
  const std::string root = NodeOf(0, std::to_string(before_.back()));
  cpus_do_not_fit = true;
  const ScopedNumaThread near(0, root);
  cpus_do_not_fit = false;
  EXPECT_EQ(AllowedCpus(), before_);
}

// The pages that a thread touches lie on one node while it runs on one CPU and has no memory
// policy.
class NumaPagesTest : public ScopedNumaThreadTest {
 protected:
  void SetUp() override {
    int policy = MPOL_DEFAULT;
    syscall(SYS_get_mempolicy, &policy, nullptr, 0, nullptr, 0);
    if (policy != MPOL_DEFAULT) GTEST_SKIP() << "the tests run with memory policy " << policy;
    RunOn({before_.front()});
  }
  void TearDown() override { RunOn(before_); }

  static void RunOn(const std::vector<int>& cpus) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int cpu : cpus) CPU_SET(cpu, &set);
    ASSERT_EQ(sched_setaffinity(0, sizeof(set), &set), 0);
  }

  const uint64_t page_bytes_ = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
};

TEST_F(NumaPagesTest, MemoryThatIsPartlyUntouchedLiesOnNoNode) {
  void* const data =
      mmap(nullptr, 4 * page_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(data, MAP_FAILED);
  char* const bytes = static_cast<char*>(data);
  bytes[0] = 1;
  const int node = NumaNodeOf(data, page_bytes_, page_bytes_);
  EXPECT_EQ(NumaNodeOf(data, 2 * page_bytes_, page_bytes_), -1);
  EXPECT_EQ(NumaNodeOf(bytes + page_bytes_, page_bytes_, page_bytes_), -1);
  EXPECT_EQ(NumaNodeOf(data, 2 * page_bytes_, 2 * page_bytes_), node)
      << "one page in two is looked at";
  EXPECT_EQ(NumaNodeOf(data, 0, page_bytes_), -1);
  munmap(data, 4 * page_bytes_);
}

TEST(NumaTest, EachPageOfALongRangeCounts) {
  constexpr uint64_t kPageBytes = 4096;
  const char* const data = nullptr;  // nobody reads it
  FakeNumaCalls calls;
  for (const uint64_t pages : {511, 512, 513, 1024, 1025}) {
    for (const int last : {3, 2, -ENOENT}) {
      calls.node_of_page = [&](const void* page) {
        return page == data + (pages - 1) * kPageBytes ? last : 3;
      };
      EXPECT_EQ(NumaNodeOf(data, (pages - 1) * kPageBytes, kPageBytes), 3) << pages;
      EXPECT_EQ(NumaNodeOf(data, pages * kPageBytes, kPageBytes), last == 3 ? 3 : -1)
          << pages << ", the last is on " << last;
    }
  }
}

TEST(NumaTest, MemoryPrefersTheNodeThatItWasToldTo) {
  const auto usable = [](int node) { return CheckNumaNode(node, kRealNumaRoot); };
  if (!usable(0).ok()) GTEST_SKIP() << usable(0);
  constexpr uint64_t kBytes = 16 * kKiB;
  void* const data =
      mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(data, MAP_FAILED);
  if (syscall(SYS_get_mempolicy, nullptr, nullptr, 0, nullptr, 0) != 0) {
    GTEST_SKIP() << "the kernel forbids it here: " << std::strerror(errno);
  }
  EXPECT_THAT(PreferNumaNode(data, kBytes, 0), IsOk());
  int mode = -1;
  unsigned long nodes[16] = {};
  ASSERT_EQ(syscall(SYS_get_mempolicy, &mode, nodes, 8 * sizeof(nodes), data, MPOL_F_ADDR), 0);
  EXPECT_EQ(mode, MPOL_PREFERRED);
  EXPECT_EQ(nodes[0], 1u);
  for (const int node : {1, 63, 64, 65}) {
    if (usable(node).ok()) continue;
    EXPECT_THAT(PreferNumaNode(data, kBytes, node),
                IsFailedPrecondition("mbind to NUMA node " + std::to_string(node) + ": Inval",
                                     "set numa_node to -1"));
  }
  munmap(data, kBytes);
}

TEST(NumaTest, TheKernelIsToldOneNodeHoweverManyThereAre) {
  FakeNumaCalls calls;
  for (const int node : {0, 1, 63, 64, 65, 127, 128, 1023}) {
    EXPECT_THAT(PreferNumaNode(nullptr, 0, node), IsOk());
    EXPECT_THAT(calls.mbind_nodes, ElementsAre(node));
  }
}

}  // namespace
}  // namespace pinion
