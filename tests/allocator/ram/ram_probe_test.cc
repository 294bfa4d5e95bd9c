#include "pinion/allocator/ram/ram_probe.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <string>

#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/tests/support/fake_host.h"
#include "pinion/tests/support/real_host_probe.h"

namespace pinion {
namespace {

using ::pinion::testing::FakeHost;
using ::pinion::testing::RealHostProbe;

TEST(RamProbeTest, AHostWithoutFilesHasNoLimits) {
  const RamSample sample = FakeHost().Probe().Sample();
  EXPECT_EQ(sample.total_bytes, 0u);
  EXPECT_EQ(sample.percent, 0);
  EXPECT_EQ(sample.headroom_bytes, UINT64_MAX);
  EXPECT_EQ(sample.limited_by, "");
}

TEST(RamProbeTest, PercentIsPsutils) {
  FakeHost host;
  // psutil 5.9: round((24665116672 - 20370804736) / 24665116672 * 100, 1)
  host.Write("proc/meminfo",
             "MemTotal:       24087028 kB\nMemFree:         1234567 kB\n"
             "MemAvailable:   19893364 kB\nCached:          2345678 kB\n");
  const RamSample sample = host.Probe().Sample();
  EXPECT_EQ(sample.total_bytes, uint64_t{24087028} * 1024);
  EXPECT_EQ(sample.available_bytes, uint64_t{19893364} * 1024);
  EXPECT_EQ(sample.percent, 17.4);
  EXPECT_EQ(sample.headroom_bytes, sample.available_bytes);
  EXPECT_EQ(sample.limited_by, "MemAvailable");
}

TEST(RamProbeTest, WithoutMemAvailableFreeAndCachedCount) {
  FakeHost host;
  host.Write("proc/meminfo", "MemTotal: 1000 kB\nMemFree: 100 kB\nCached: 300 kB\n");
  EXPECT_EQ(host.Probe().Sample().available_bytes, 400u * 1024);
}

TEST(RamProbeTest, AnAvailableAboveTheTotalIsReplacedByFree) {
  FakeHost host;
  host.Write("proc/meminfo", "MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 1000 kB\n");
  EXPECT_EQ(host.Probe().Sample().available_bytes, 1000u * 1024);
  host.Write("proc/meminfo", "MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 2000 kB\n");
  EXPECT_EQ(host.Probe().Sample().available_bytes, 100u * 1024);
}

class RamProbeCgroupTest : public ::testing::Test {
 protected:
  struct Limits {
    uint64_t max = UINT64_MAX;
    uint64_t high = UINT64_MAX;
    std::string stat = "";
  };

  RamProbeCgroupTest() {
    host_.SetMeminfo(64 * kGiB, 60 * kGiB);
    host_.Write("proc/self/cgroup", "0::/a/b\n");
  }

  void SetCgroup(const std::string& path, uint64_t current_bytes, const Limits& limits) {
    const std::string files = "cgroup" + path + "/memory.";
    const auto text = [](uint64_t bytes) {
      return (bytes == UINT64_MAX ? "max" : std::to_string(bytes)) + "\n";
    };
    host_.Write(files + "max", text(limits.max));
    host_.Write(files + "high", text(limits.high));
    host_.Write(files + "current", text(current_bytes));
    host_.Write(files + "stat", limits.stat);
  }

  void ExpectHeadroom(uint64_t bytes, const std::string& limited_by) const {
    const RamSample sample = host_.Probe().Sample();
    EXPECT_EQ(sample.headroom_bytes, bytes);
    EXPECT_EQ(sample.limited_by, limited_by);
  }

  FakeHost host_;
};

TEST_F(RamProbeCgroupTest, MaxMeansNoLimit) {
  SetCgroup("/a/b", 1000000, {});
  ExpectHeadroom(60 * kGiB, "MemAvailable");
}

// A container of 8 GiB on a host of 78 GiB read 76 GiB free (kekzl/imp#2070).
TEST_F(RamProbeCgroupTest, TheProcessesOwnLimitBounds) {
  // Of two limits that leave as much the first is named.
  SetCgroup("/a/b", kGiB, {.max = 8 * kGiB, .high = 8 * kGiB});
  ExpectHeadroom(7 * kGiB, "cgroup /a/b memory.max");
  // psutil's, which knows the host only: 4 of 64 GiB are 6.25 %, which Python rounds to even.
  EXPECT_EQ(host_.Probe().Sample().percent, 6.2);
}

// psutil reported 450 GB in a container of 102 GB, and the kernel killed the process (tabicl#145).
TEST_F(RamProbeCgroupTest, EveryAncestorsLimitBoundsInBothVersions) {
  const std::string levels[] = {"/a/b/c/d", "/a/b/c", "/a/b", "/a", ""};
  for (const bool v1 : {false, true}) {
    for (const std::string& tight : levels) {
      SCOPED_TRACE(::testing::Message() << (v1 ? "v1 " : "v2 ") << tight << "/");
      const std::string limit = v1 ? "memory.limit_in_bytes" : "memory.max";
      FakeHost host;
      host.SetMeminfo(64 * kGiB, 60 * kGiB);
      host.Write("proc/self/cgroup", v1 ? "4:memory:/a/b/c/d\n0::/\n" : "0::/a/b/c/d\n");
      for (const std::string& level : levels) {
        const std::string directory = (v1 ? "cgroup/memory" : "cgroup") + level + "/";
        host.Write(directory + limit, std::to_string((level == tight ? 3 : 9) * kGiB));
        host.Write(directory + (v1 ? "memory.usage_in_bytes" : "memory.current"),
                   std::to_string(kGiB));
      }
      const RamSample sample = host.Probe().Sample();
      EXPECT_EQ(sample.headroom_bytes, 2 * kGiB);
      EXPECT_EQ(sample.limited_by, "cgroup " + (tight.empty() ? "/" : tight) + " " + limit);
    }
  }
}

TEST_F(RamProbeCgroupTest, HighBoundsBeforeMaxDoes) {
  SetCgroup("/a/b", 0, {.max = 8 * kGiB, .high = 4 * kGiB});
  ExpectHeadroom(4 * kGiB, "cgroup /a/b memory.high");
}

TEST_F(RamProbeCgroupTest, APercentageOfTheLimitMayBeAllThatCounts) {
  SetCgroup("/a/b", 200000, {.max = 1000000});
  // Of the parent's 2,000,000 less is left above 50 %, though more below 100 %.
  SetCgroup("/a", 900000, {.max = 2000000});
  ExpectHeadroom(800000, "cgroup /a/b memory.max");
  const RamSample half = host_.Probe().Sample(50);
  EXPECT_EQ(half.headroom_bytes, 100000u);
  EXPECT_EQ(half.limited_by, "50 % of cgroup /a memory.max");
}

// In a peer the file cache of a container counted as used (imp#2070).
// A container of 70 GiB read 0.45 GiB of headroom while 68.9 GiB were file cache.
TEST_F(RamProbeCgroupTest, WhatTheKernelCanReclaimIsNotUsed) {
  SetCgroup("/a/b", 9900000,
            {.max = 10000000,
             .stat = "anon 1000\nactive_file 4000000\ninactive_file 3000000\n"
                     "slab_reclaimable 900000\n"});
  ExpectHeadroom(8000000, "cgroup /a/b memory.max");
}

// `file` contains shared memory, and so pinned memory: to subtract it would count what is locked
// as free.
TEST_F(RamProbeCgroupTest, SharedMemoryIsUsed) {
  SetCgroup("/a/b", 9900000,
            {.max = 10000000, .stat = "file 9000000\nshmem 9000000\nactive_file 0\n"});
  ExpectHeadroom(100000, "cgroup /a/b memory.max");
}

TEST_F(RamProbeCgroupTest, ALimitWhoseUsageIsUnknownIsNone) {
  host_.Write("cgroup/a/b/memory.max", "1000\n");
  ExpectHeadroom(60 * kGiB, "MemAvailable");
}

TEST_F(RamProbeCgroupTest, ALimitOfZeroIsZero) {
  SetCgroup("/a/b", 0, {.max = 0});
  ExpectHeadroom(0, "cgroup /a/b memory.max");
}

TEST_F(RamProbeCgroupTest, UsageAboveTheLimitLeavesNothing) {
  SetCgroup("/a/b", 5000, {.high = 1000});
  ExpectHeadroom(0, "cgroup /a/b memory.high");
}

// In a container the file may show the host's path while the mount begins at the container. A path
// above the namespace would lead to the files beside the mount.
TEST_F(RamProbeCgroupTest, APathThatIsNotMountedOrIsAboveTheNamespaceIsTheRoot) {
  SetCgroup("", kGiB, {.max = 2 * kGiB});
  host_.Write("memory.max", "1\n");
  host_.Write("memory.current", "0\n");
  SetCgroup("/app", 1000, {.max = 3000});
  SetCgroup("/a/app", 1000, {.max = 4000});
  const struct {
    std::string path;
    uint64_t bytes;
    std::string limited_by;
  } rows[] = {
      {"/docker/0123abcd", kGiB, "cgroup / memory.max"},
      {"/../../other", kGiB, "cgroup / memory.max"},
      {"/docker/0123abcd/app", 2000, "cgroup /app memory.max"},
      // Another one, /app, has the same name.
      {"/a/app", 3000, "cgroup /a/app memory.max"},
      {"/docker/0123abcd/a/app", 3000, "cgroup /a/app memory.max"},
  };
  for (const auto& [path, bytes, limited_by] : rows) {
    SCOPED_TRACE(path);
    host_.Write("proc/self/cgroup", "0::" + path + "\n");
    ExpectHeadroom(bytes, limited_by);
  }
}

TEST_F(RamProbeCgroupTest, LinesThatNameNoCgroupAreSkipped) {
  host_.Write("proc/self/cgroup", "nothing\n0:\n0::\n0::relative\n0::/a/b\n");
  SetCgroup("/a/b", 0, {.max = 1000});
  ExpectHeadroom(1000, "cgroup /a/b memory.max");
}

TEST_F(RamProbeCgroupTest, VersionOneIsRead) {
  host_.Write("proc/self/cgroup", "12:cpuset:/x\n7:cpu,memory:/a/b\n1:name=systemd:/a\n0::/\n");
  // Of a cgroup that the process is in for other controllers only.
  host_.Write("cgroup/memory/x/memory.limit_in_bytes", "1\n");
  host_.Write("cgroup/memory/x/memory.usage_in_bytes", "0\n");
  host_.Write("cgroup/memory/a/b/memory.limit_in_bytes", "9223372036854771712\n");
  host_.Write("cgroup/memory/a/b/memory.usage_in_bytes", "1000\n");
  host_.Write("cgroup/memory/a/memory.limit_in_bytes", "3000000\n");
  host_.Write("cgroup/memory/a/memory.usage_in_bytes", "2500000\n");
  host_.Write("cgroup/memory/a/memory.stat",
              "active_file 1\ntotal_active_file 300000\ntotal_inactive_file 200000\n");
  ExpectHeadroom(1000000, "cgroup /a memory.limit_in_bytes");
  // The limit of an ancestor that the namespace hides.
  host_.Write("cgroup/memory/a/b/memory.stat",
              "hierarchical_memory_limit 600000\ntotal_active_file 100\n");
  ExpectHeadroom(599100, "cgroup /a/b hierarchical_memory_limit");
  host_.Write("cgroup/memory/a/b/memory.stat", "hierarchical_memory_limit 9223372036854771712\n");
  ExpectHeadroom(1000000, "cgroup /a memory.limit_in_bytes");
}

// The largest number of whole pages, and the least that is taken for one of those.
TEST(RamProbeTest, AnUnlimitedCgroupOfVersionOneDoesNotBoundAHostThatCannotBeRead) {
  for (const std::string limit : {"9223372036854771712", "4611686018427387904"}) {
    FakeHost host;
    host.Write("proc/self/cgroup", "4:memory:/a\n");
    host.Write("cgroup/memory/a/memory.limit_in_bytes", limit + "\n");
    host.Write("cgroup/memory/a/memory.usage_in_bytes", "1000\n");
    const RamSample sample = host.Probe().Sample();
    EXPECT_EQ(sample.headroom_bytes, UINT64_MAX) << limit;
    EXPECT_EQ(sample.limited_by, "") << limit;
  }
}

TEST(RamProbeTest, WhatOthersUseOfThisHostIsNothingToATest) {
  const RamSample sample = RamProbe().Sample(90);
  EXPECT_EQ(sample.headroom_bytes, 1024 * kGiB);
  EXPECT_EQ(sample.limited_by, "MemAvailable");
}

// On a host with several NUMA nodes it would ask for the memory policy, which Docker forbids.
TEST(RamProbeTest, NoFileOfThisHostReachesATest) {
  const std::string node = "/sys/devices/system/node/";
  for (const std::string& path : {std::string("/proc/meminfo"), std::string("/proc/self/cgroup"),
                                  node + "has_memory", node + "has_cpu", node + "node0/meminfo"}) {
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) continue;
    struct stat status = {};
    EXPECT_EQ(fstat(file, &status), 0);
    EXPECT_EQ(status.st_nlink, 0u) << path << " lies in a directory, and not in memory";
    close(file);
  }
}

TEST(RamProbeTest, ThisHostCanBeRead) {
  const RamSample sample = RealHostProbe().Sample();
  EXPECT_GT(sample.total_bytes, 0u);
  EXPECT_LE(sample.headroom_bytes, sample.total_bytes);
  EXPECT_NE(sample.limited_by, "");
}

}  // namespace
}  // namespace pinion
