#include "pinion/allocator/sources/numa.h"

#include <dlfcn.h>
#include <linux/mempolicy.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/tests/support/fake_host.h"
#include "pinion/tests/support/status_matchers.h"

// The C library's, except that there are nodes for mbind which this host does not have.
namespace {
bool nodes_are_recorded = false;
std::vector<int> recorded_nodes;

// As the kernel does, which reads one bit less than it is told.
std::vector<int> NodesOf(const unsigned long* words, unsigned long told_bits) {
  constexpr unsigned long kBitsPerWord = 8 * sizeof(unsigned long);
  std::vector<int> nodes;
  for (unsigned long bit = 0; bit + 1 < told_bits; ++bit) {
    if (words[bit / kBitsPerWord] >> (bit % kBitsPerWord) & 1) {
      nodes.push_back(static_cast<int>(bit));
    }
  }
  return nodes;
}
}  // namespace

extern "C" long syscall(long number, ...) noexcept {
  static const auto next = reinterpret_cast<long (*)(long, ...)>(dlsym(RTLD_NEXT, "syscall"));
  long arguments[6];
  va_list list;
  va_start(list, number);
  for (long& argument : arguments) argument = va_arg(list, long);
  va_end(list);
  if (number == SYS_mbind && nodes_are_recorded) {
    recorded_nodes = NodesOf(reinterpret_cast<const unsigned long*>(arguments[3]), arguments[4]);
    return 0;
  }
  return next(number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4],
              arguments[5]);
}

// The C library's, but for a kernel of more CPUs than a set has room for: that one fails, and what
// it leaves in the set means nothing.
namespace {
bool cpus_do_not_fit = false;
}  // namespace

extern "C" int sched_getaffinity(pid_t thread, size_t size_bytes, cpu_set_t* cpus) noexcept {
  static const auto next =
      reinterpret_cast<int (*)(pid_t, size_t, cpu_set_t*)>(dlsym(RTLD_NEXT, "sched_getaffinity"));
  if (!cpus_do_not_fit) return next(thread, size_bytes, cpus);
  std::memset(cpus, 0xff, size_bytes);
  errno = EINVAL;
  return -1;
}

namespace pinion {
namespace {

using ::pinion::testing::FakeHost;
using ::pinion::testing::IsOk;
using ::pinion::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<int> AllowedCpus() {
  cpu_set_t set;
  EXPECT_EQ(sched_getaffinity(0, sizeof(set), &set), 0);
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  }
  return cpus;
}

TEST(NumaTest, EveryNodeOfTheKernelsListIsThereAndNoOther) {
  FakeHost host;
  host.Write("online", "0-2,5,8-9\n");
  const std::string root = host.root().string() + "/";
  EXPECT_EQ(NumaNodes(root), "0-2,5,8-9");
  for (int node = -1; node < 12; ++node) {
    const bool there = (0 <= node && node <= 2) || node == 5 || node == 8 || node == 9;
    EXPECT_EQ(HasNumaNode(node, root), there) << node;
  }
}

TEST(NumaTest, AHostThatDoesNotTellHasNoNode) {
  FakeHost host;
  EXPECT_EQ(NumaNodes(host.root().string() + "/"), "");
  EXPECT_FALSE(HasNumaNode(0, host.root().string() + "/"));
}

TEST(NumaTest, AListThatIsNoneNamesNoNode) {
  FakeHost host;
  host.Write("online", "none,0\n");
  EXPECT_FALSE(HasNumaNode(0, host.root().string() + "/"));
}

class ScopedNumaThreadTest : public ::testing::Test {
 protected:
  ScopedNumaThreadTest() : before_(AllowedCpus()) {}
  ~ScopedNumaThreadTest() override { EXPECT_EQ(AllowedCpus(), before_); }

  // A node of these CPUs.
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

TEST(NumaTest, MemoryThatIsPartlyUntouchedLiesOnNoNode) {
  constexpr uint64_t kPage = 4096;
  void* const data =
      mmap(nullptr, 4 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(data, MAP_FAILED);
  char* const bytes = static_cast<char*>(data);
  bytes[0] = 1;
  const int node = NumaNodeOf(data, kPage, kPage);
  EXPECT_EQ(NumaNodeOf(data, 2 * kPage, kPage), -1);
  EXPECT_EQ(NumaNodeOf(bytes + kPage, kPage, kPage), -1);
  EXPECT_EQ(NumaNodeOf(data, 2 * kPage, 2 * kPage), node) << "one page in two is looked at";
  EXPECT_EQ(NumaNodeOf(data, 0, kPage), -1);
  munmap(data, 4 * kPage);
}

TEST(NumaTest, MemoryPrefersTheNodeThatItWasToldTo) {
  constexpr uint64_t kBytes = 16 * kKiB;
  void* const data =
      mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(data, MAP_FAILED);
  const absl::Status status = PreferNumaNode(data, kBytes, 0);
  if (absl::StrContains(status.message(), "CAP_SYS_NICE")) GTEST_SKIP() << status;
  EXPECT_THAT(status, IsOk());
  int mode = -1;
  unsigned long nodes[16] = {};
  ASSERT_EQ(syscall(SYS_get_mempolicy, &mode, nodes, 8 * sizeof(nodes), data, MPOL_F_ADDR), 0);
  EXPECT_EQ(mode, MPOL_PREFERRED);
  EXPECT_EQ(nodes[0], 1u);
  for (const int node : {1, 63, 64, 65}) {
    if (HasNumaNode(node)) continue;
    EXPECT_THAT(PreferNumaNode(data, kBytes, node),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         HasSubstr("mbind to NUMA node " + std::to_string(node) + ": Invalid")));
  }
  munmap(data, kBytes);
}

TEST(NumaTest, TheKernelIsToldOneNodeHoweverManyThereAre) {
  nodes_are_recorded = true;
  for (const int node : {0, 1, 63, 64, 65, 127, 128, 1023}) {
    EXPECT_THAT(PreferNumaNode(nullptr, 0, node), IsOk());
    EXPECT_THAT(recorded_nodes, ElementsAre(node));
  }
  nodes_are_recorded = false;
}

}  // namespace
}  // namespace pinion
