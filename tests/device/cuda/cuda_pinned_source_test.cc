// Alignment and page locking of cudaHostAlloc's memory; on the fake runtime.

#include <sched.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/device/cuda/cuda_device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/tests/device/cuda/fake_cuda.h"
#include "pinion/tests/support/captured_log.h"
#include "pinion/tests/support/fake_host.h"
#include "pinion/tests/support/full_heap.h"
#include "pinion/tests/support/status_matchers.h"
#include "pinion/tests/support/status_says.h"

// Replaces the C library's functions: records the locked ranges, or refuses to lock.
namespace {
bool refuses_to_lock = false;
std::map<const void*, size_t> locked;
}  // namespace

extern "C" int mlock2(const void* data, size_t size_bytes, unsigned flags) noexcept {
  EXPECT_EQ(flags, 0u) << "with MLOCK_ONFAULT pages would come as they are touched";
  if (refuses_to_lock) {
    errno = ENOMEM;
    return -1;
  }
  locked[data] = size_bytes;
  return 0;
}

extern "C" int munlock(const void* data, size_t) noexcept {
  locked.erase(data);
  return 0;
}

namespace pinion {
namespace {

using ::pinion::testing::CapturedLog;
using ::pinion::testing::FakeCuda;
using ::pinion::testing::FakeHost;
using ::pinion::testing::FullHeap;
using ::pinion::testing::IsInvalid;
using ::pinion::testing::IsOk;
using ::testing::HasSubstr;

EmulatedOptions Machine(const char* preset) {
  EmulatedOptions options;
  options.preset = *FindPreset(preset);
  return options;
}

class CudaPinnedSourceTest : public ::testing::Test {
 protected:
  ~CudaPinnedSourceTest() override {
    refuses_to_lock = false;
    locked.clear();
  }
};

// CUDA's header says that "cudaMallocHost may not page-lock the allocated memory" there.
TEST_F(CudaPinnedSourceTest, WhereTheDeviceReadsTheHostsPageTablesTheSourceLocksThePages) {
  const FakeCuda fake(Machine("gh200_c2c"));
  CudaPinnedSource source(FakeCuda::Api(), 0);
  PINION_ASSERT_OK_AND_ASSIGN(const HostSegment segment, source.Allocate(2 * kMiB));
  EXPECT_EQ(locked[segment.data], 2 * kMiB);
  EXPECT_TRUE(source.pinned());
  EXPECT_THAT(source.Free(segment), IsOk());
  EXPECT_TRUE(locked.empty());
}

TEST_F(CudaPinnedSourceTest, MemoryThatTheSystemRefusesToLockIsNotCalledPinned) {
  const FakeCuda fake(Machine("gh200_c2c"));
  CudaPinnedSource source(FakeCuda::Api(), 0);
  refuses_to_lock = true;
  const CapturedLog log;
  for (int i = 0; i < 2; ++i) {
    PINION_ASSERT_OK_AND_ASSIGN(const HostSegment segment, source.Allocate(2 * kMiB));
    EXPECT_FALSE(source.pinned());
    EXPECT_THAT(source.Free(segment), IsOk());
  }
  const std::string text = log.text();
  EXPECT_THAT(text, HasSubstr("the system refuses to"));
  EXPECT_EQ(text.find("refuses to"), text.rfind("refuses to")) << "said once";
}

TEST_F(CudaPinnedSourceTest, WhereCudaLocksThePagesNobodyElseDoes) {
  const FakeCuda fake(Machine("h100_pcie5"));
  CudaPinnedSource source(FakeCuda::Api(), 0);
  refuses_to_lock = true;
  PINION_ASSERT_OK_AND_ASSIGN(const HostSegment segment, source.Allocate(2 * kMiB));
  EXPECT_TRUE(source.pinned());
  EXPECT_THAT(source.Free(segment), IsOk());
}

TEST_F(CudaPinnedSourceTest, ADeviceThatThereIsNotIsNamedByAllocate) {
  const FakeCuda fake(Machine("h100_pcie5"));
  for (const int index : {-1, 1, 99}) {
    CudaPinnedSource source(FakeCuda::Api(), index);
    EXPECT_THAT(source.Allocate(2 * kMiB),
                IsInvalid("the context of cuda:" + std::to_string(index) + " current"));
    EXPECT_THAT(source.Free({nullptr, 2 * kMiB}), IsInvalid("no segment of 2 MiB in use at 0x0"));
  }
}

// Only one heap allocation fails at a time, as the clean-up of the fake and its machine needs some.
TEST_F(CudaPinnedSourceTest, NothingStaysPinnedOrCurrentWhereTheHeapIsFull) {
  refuses_to_lock = true;
  const CapturedLog log;
  for (const char* const preset : {"h100_pcie5", "gh200_c2c"}) {
    for (const int index : {0, 1}) {
      EmulatedOptions options = Machine(preset);
      options.device_count = 2;
      const FakeCuda fake(options);
      CudaPinnedSource source(FakeCuda::Api(), index);
      PINION_ASSERT_OK_AND_ASSIGN(const HostSegment first, source.Allocate(2 * kMiB));
      ASSERT_THAT(source.Free(first), IsOk());
      int64_t lasts = 0;
      do {
        ASSERT_LT(lasts, 1000);
        HostSegment got;
        try {
          const FullHeap full(lasts++, FullHeap::Fails::kOne);
          const absl::StatusOr<HostSegment> segment = source.Allocate(2 * kMiB);
          if (segment.ok()) got = *segment;
          source.Free(got).IgnoreError();
        } catch (const std::bad_alloc&) {
        }
        source.Free(got).IgnoreError();  // if Free has thrown
        EXPECT_TRUE(FakeCuda::thread().pushed.empty()) << preset << index;
        EXPECT_EQ(fake.live_segments(), 0u) << preset << index << " after " << lasts - 1;
      } while (FullHeap::refusals() > 0);
    }
  }
}

std::vector<int> CpusOf(const cpu_set_t& set) {
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  }
  return cpus;
}

std::vector<int> AllowedCpus() {
  cpu_set_t set;
  EXPECT_EQ(sched_getaffinity(0, sizeof(set), &set), 0);
  return CpusOf(set);
}

TEST_F(CudaPinnedSourceTest, MemoryIsPinnedByAThreadOnTheNodeNextToTheDevice) {
  const std::vector<int> before = AllowedCpus();
  if (before.size() < 2) GTEST_SKIP() << "one CPU is no choice";
  FakeHost host;
  host.Write("bus/pci/devices/0000:41:00.0/numa_node", "2\n");
  host.Write("bus/pci/devices/0000:c1:00.0/numa_node", "3\n");
  host.Write("devices/system/node/node2/cpulist", std::to_string(before.front()) + "\n");
  host.Write("devices/system/node/node3/cpulist", std::to_string(before.back()) + "\n");
  EmulatedOptions options = Machine("h100_pcie5");
  options.device_count = 2;
  FakeCuda fake(options);
  fake.SetBusId(0, "0000:41:00.0");
  fake.SetBusId(1, "0000:C1:00.0");
  for (const int index : {0, 1}) {
    CudaPinnedSource source(FakeCuda::Api(), index, host.root().string());
    PINION_ASSERT_OK_AND_ASSIGN(const HostSegment segment, source.Allocate(2 * kMiB));
    EXPECT_EQ(CpusOf(fake.pinning_cpus()),
              std::vector<int>{index == 0 ? before.front() : before.back()});
    EXPECT_EQ(AllowedCpus(), before);
    EXPECT_THAT(source.Free(segment), IsOk());
  }
}

}  // namespace
}  // namespace pinion
