// Headroom of a process that can use the memory of some NUMA nodes alone.

#include <linux/mempolicy.h>

#include <cerrno>
#include <cstdint>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/ram/ram_probe.h"
#include "pinion/allocator/ram/ram_watermark.h"
#include "pinion/tests/support/captured_log.h"
#include "pinion/tests/support/child_process.h"
#include "pinion/tests/support/fake_host.h"
#include "pinion/tests/support/fake_numa_calls.h"
#include "pinion/tests/support/status_matchers.h"
#include "pinion/tests/support/status_says.h"

namespace pinion {
namespace {

using ::pinion::testing::CapturedLog;
using ::pinion::testing::ChildProcess;
using ::pinion::testing::FakeHost;
using ::pinion::testing::FakeNumaCalls;
using ::pinion::testing::IsExhausted;
using ::pinion::testing::IsOk;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

// Two nodes of 32 GiB: 8 GiB are free on node 0, 28 GiB on node 1.
class NumaHeadroomTest : public ::testing::Test {
 protected:
  NumaHeadroomTest() {
    host_.SetMeminfo(64 * kGiB, 36 * kGiB);
    host_.SetNodes("0-1", "0-1");
    host_.SetNode(0, 32 * kGiB, 8 * kGiB);
    host_.SetNode(1, 32 * kGiB, 28 * kGiB);
    SetCpuset("0-1");
  }

  void SetCpuset(const std::string& nodes) {
    host_.Write("proc/self/status", "Name:\tx\nMems_allowed_list:\t" + nodes + "\n");
  }
  void Bind(int node) {
    calls_.policy = MPOL_BIND;
    calls_.policy_nodes = {node};
  }
  // GH200: the GPU's memory is node 1.
  void TakeProcessorsFromNode1() {
    host_.SetNodes("0-1", "0");
    host_.SetMeminfo(64 * kGiB, 36 * kGiB);
  }
  template <typename Name>
  void ExpectHeadroom(uint64_t bytes, const Name& limited_by) {
    EXPECT_EQ(Sample().headroom_bytes, bytes);
    EXPECT_THAT(Sample().limited_by, limited_by);
  }
  RamSample Sample(double percent = 100) { return host_.Probe().Sample(percent); }

  FakeHost host_;
  FakeNumaCalls calls_;
};

TEST_F(NumaHeadroomTest, WhereAllNodesCanBeUsedTheHostIsTheBound) {
  for (const int policy : {MPOL_DEFAULT, MPOL_PREFERRED, MPOL_INTERLEAVE, MPOL_PREFERRED_MANY}) {
    SCOPED_TRACE(policy);
    calls_.policy = policy;
    calls_.policy_nodes = {0};
    ExpectHeadroom(36 * kGiB, "MemAvailable");
  }
}

TEST_F(NumaHeadroomTest, UnderMpolBindOnlyItsNodesHaveHeadroom) {
  Bind(0);
  ExpectHeadroom(8 * kGiB, AllOf(StartsWith("NUMA node 0 ("), HasSubstr("MPOL_BIND"),
                                 HasSubstr("numactl --membind")));
  EXPECT_EQ(Sample().total_bytes, 64 * kGiB) << "the percentage is psutil's, of the host";
  EXPECT_EQ(Sample().available_bytes, 36 * kGiB);
}

TEST_F(NumaHeadroomTest, OnlyTheNodesOfTheCpusetHaveHeadroom) {
  SetCpuset("0");
  ExpectHeadroom(8 * kGiB, AllOf(StartsWith("NUMA node 0 ("), HasSubstr("Mems_allowed"),
                                 HasSubstr("cpuset.mems"), Not(HasSubstr("MPOL_BIND"))));
}

TEST_F(NumaHeadroomTest, TheNodesOfOneProcessAreAddedUp) {
  host_.SetNodes("0-2", "0-2");
  host_.SetNode(2, 32 * kGiB, kGiB);
  SetCpuset("0,2");
  ExpectHeadroom(9 * kGiB, StartsWith("NUMA nodes 0,2 ("));
}

TEST_F(NumaHeadroomTest, APolicyWithinACpusetIsNamed) {
  host_.SetNodes("0-2", "0-2");
  SetCpuset("0-1");
  Bind(0);
  EXPECT_THAT(Sample().limited_by, AllOf(StartsWith("NUMA node 0 ("), HasSubstr("MPOL_BIND")));
}

// Pages of a full node are taken from the others only where the policy lets the kernel do so.
TEST_F(NumaHeadroomTest, APercentageOfTheNodesIsAllThatCounts) {
  Bind(0);
  const RamSample sample = Sample(90);
  EXPECT_NEAR(static_cast<double>(sample.headroom_bytes), 4.8 * kGiB, 1);
  EXPECT_THAT(sample.limited_by, StartsWith("90 % of NUMA node 0 ("));
}

// A node has no more than its memory, whatever it can reclaim.
TEST_F(NumaHeadroomTest, OnANodeTheKernelReclaimsTheCacheOfFilesAndSharedMemoryStays) {
  Bind(0);
  host_.SetNode(0, 32 * kGiB, kGiB,
                "Node 0 Active(file): 1048576 kB\nNode 0 Inactive(file): 2097152 kB\n"
                "Node 0 FilePages: 20971520 kB\nNode 0 Shmem: 17825792 kB\n"
                "Node 0 KReclaimable: 1048576 kB\nNode 0 SReclaimable: 1048576 kB\n");
  EXPECT_EQ(Sample().headroom_bytes, 9 * kGiB / 2);
  host_.SetNode(0, 2 * kGiB, kGiB, "Node 0 Active(file): 2097152 kB\n");
  EXPECT_EQ(Sample().headroom_bytes, 2 * kGiB);
}

TEST_F(NumaHeadroomTest, ACgroupThatLeavesLessIsTheBound) {
  Bind(0);
  host_.Write("proc/self/cgroup", "0::/pod\n");
  host_.Write("cgroup/pod/memory.max", "1073741824\n");
  host_.Write("cgroup/pod/memory.current", "0\n");
  EXPECT_EQ(Sample().limited_by, "cgroup /pod memory.max");
}

TEST_F(NumaHeadroomTest, TheMemoryOfNodesWithoutProcessorsDoesNotCount) {
  TakeProcessorsFromNode1();
  const RamSample sample = Sample(90);
  EXPECT_EQ(sample.total_bytes, 32 * kGiB);
  EXPECT_EQ(sample.available_bytes, 8 * kGiB);
  EXPECT_EQ(sample.percent, 75.0);
  EXPECT_EQ(sample.headroom_bytes, 8 * kGiB);
  EXPECT_EQ(sample.limited_by, "NUMA node 0 (nodes without processors do not count)");
}

TEST_F(NumaHeadroomTest, ABindToNodesWithAndWithoutProcessorsIsNone) {
  TakeProcessorsFromNode1();
  calls_.policy = MPOL_BIND;
  calls_.policy_nodes = {0, 1};
  EXPECT_EQ(Sample(90).headroom_bytes, 8 * kGiB);
}

TEST_F(NumaHeadroomTest, OnNodesWithoutProcessorsAloneThereIsNoHeadroom) {
  TakeProcessorsFromNode1();
  Bind(1);
  ExpectHeadroom(0, StartsWith("NUMA node 1 without processors (MPOL_BIND"));
}

// Seen in virtual machines.
TEST_F(NumaHeadroomTest, WhereNoNodeHasBothMemoryAndProcessorsAllCount) {
  host_.SetNodes("0-1", "2");
  EXPECT_EQ(Sample().total_bytes, 64 * kGiB);
  Bind(0);
  EXPECT_EQ(Sample().headroom_bytes, 8 * kGiB);
}

TEST_F(NumaHeadroomTest, AHostOfOneNodeIsNotAskedForPolicies) {
  host_.SetNodes("0", "0");
  SetCpuset("1");
  Bind(1);
  EXPECT_EQ(Sample().limited_by, "MemAvailable");
  EXPECT_EQ(calls_.count, 0);
}

TEST_F(NumaHeadroomTest, WhatTheKernelDoesNotTellOfNodesIsNoBound) {
  SetCpuset("5");
  EXPECT_EQ(Sample().limited_by, "MemAvailable") << "a cpuset of no node that there is";
  SetCpuset("0-2");
  host_.SetNodes("0-2", "0-2");
  Bind(2);
  EXPECT_EQ(Sample().limited_by, "MemAvailable") << "a node without meminfo";
  host_.SetNodes("0-2", "2");
  EXPECT_EQ(Sample().limited_by, "MemAvailable") << "a node without meminfo";
  host_.Write("proc/meminfo", "");
  Bind(0);
  host_.SetNodes("0-1", "0-1");
  EXPECT_EQ(Sample().headroom_bytes, UINT64_MAX);
}

// Docker's usual filter of system calls.
TEST_F(NumaHeadroomTest, WherePoliciesAreForbiddenMemoryComesFromAnyNodeAndTheLogSaysSoOnce) {
  Bind(0);
  // Whether the log has said so is the process's.
  ChildProcess child([this] {
    const CapturedLog log;
    for (const int error : {EPERM, ENOSYS}) {
      calls_.error = error;
      EXPECT_EQ(Sample().headroom_bytes, 36 * kGiB);
      EXPECT_EQ(Sample().limited_by, "MemAvailable");
    }
    EXPECT_EQ(calls_.count, 4);
    EXPECT_THAT(log.text(), AllOf(HasSubstr("get_mempolicy: Operation not permitted"),
                                  HasSubstr("CAP_SYS_NICE"), Not(HasSubstr("not implemented"))));
    SetCpuset("0");
    EXPECT_EQ(Sample().headroom_bytes, 8 * kGiB) << "a cpuset is told by a file";
  });
  EXPECT_EQ(child.Wait(), 0);
}

// A process that was bound to one of two nodes was killed with half of the host's RAM free.
TEST_F(NumaHeadroomTest, AGrowthThatFitsTheHostAndNotItsNodesIsRefusedWithTheRemedy) {
  RamWatermark watermark(AllocatorOptions(), host_.Probe());
  EXPECT_THAT(watermark.AdmitGrowth(5 * kGiB), IsOk());
  Bind(0);
  EXPECT_THAT(watermark.AdmitGrowth(4 * kGiB), IsOk());
  EXPECT_THAT(watermark.AdmitGrowth(5 * kGiB),
              IsExhausted("does not fit the 4.8 GiB that 90 % of NUMA node 0 (MPOL_BIND",
                          "numactl --membind"));
  EXPECT_GT(watermark.BytesToGiveBack(5 * kGiB), 0u);
}

}  // namespace
}  // namespace pinion
