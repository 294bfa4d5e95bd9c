#include "pinion/device/emulated/device_heap.h"

#include <sys/mman.h>

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/emulated/engines.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace {

using ::pinion::testing::IsOk;
using ::pinion::testing::StatusIs;
using ::testing::HasSubstr;

class DeviceHeapTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kReserve = 16 * kMiB;

  char* Allocate(uint64_t size_bytes, const std::string& label = "") {
    return static_cast<char*>(heap_.Allocate(size_bytes, label, own_).value());
  }
  void Run(int slot, double latency_ms) {
    static char from, to;
    CopyCost cost;
    cost.latency_ms = latency_ms;
    simulation_.SubmitCopy(slot, "copy H2D", {{&to, &from, 1}}, cost);
  }

  EmulatedOptions options_;
  Simulation simulation_{options_, /*trace=*/nullptr};
  const int own_ = simulation_.AddStream(0, "emu:0/default");
  const int other_ = simulation_.AddStream(0, "emu:0/side");
  MemoryArena arena_{
      mmap(nullptr, kReserve, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), kReserve,
      /*quarantine=*/false};
  DeviceHeap heap_{0, /*limit_bytes=*/4 * kMiB, &arena_, &simulation_, /*trace=*/nullptr};
};

TEST_F(DeviceHeapTest, KnowsWhatLiesInOneAllocation) {
  char* const data = Allocate(kMiB);
  EXPECT_TRUE(heap_.Contains(data, kMiB));
  EXPECT_TRUE(heap_.Contains(data + kMiB - 1, 1));
  EXPECT_FALSE(heap_.Contains(data + 1, kMiB));
  EXPECT_THAT(heap_.Free(data, own_), IsOk());
  EXPECT_FALSE(heap_.Contains(data, 1));
}

TEST_F(DeviceHeapTest, WhatIsFreedReadsAsNan) {
  float* const data = reinterpret_cast<float*>(Allocate(sizeof(float)));
  *data = 1;
  EXPECT_THAT(heap_.Free(data, own_), IsOk());
  EXPECT_NE(*data, *data);
}

TEST_F(DeviceHeapTest, FreedMemoryIsInUseUntilRecordedStreamsHaveCome) {
  char* const data = Allocate(kMiB);
  Run(other_, /*latency_ms=*/3);
  EXPECT_THAT(heap_.RecordStream(data + 5, other_), IsOk());
  EXPECT_THAT(heap_.Free(data, own_), IsOk());
  EXPECT_EQ(heap_.GetStats().in_use_bytes, kMiB);
  EXPECT_THAT(heap_.Report(), HasSubstr("recorded streams are not done 1 MiB"));
  EXPECT_THAT(simulation_.Synchronize(other_), IsOk());
  EXPECT_EQ(heap_.GetStats().in_use_bytes, 0u);
}

TEST_F(DeviceHeapTest, AnAllocationWaitsForMemoryThatStreamsHold) {
  char* const data = Allocate(4 * kMiB);
  Run(own_, /*latency_ms=*/3);
  EXPECT_THAT(heap_.RecordStream(data, own_), IsOk());
  EXPECT_THAT(heap_.Free(data, own_), IsOk());
  EXPECT_LT(simulation_.time().now_ms(), 3);
  Allocate(kMiB);
  EXPECT_GE(simulation_.time().now_ms(), 3);
}

TEST_F(DeviceHeapTest, OutOfMemorySaysWhoHoldsIt) {
  Allocate(3 * kMiB, "activations");
  EXPECT_THAT(heap_.Allocate(2 * kMiB, "", own_),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       HasSubstr("activations 3 MiB (1 allocation)")));
  heap_.SetLimit(5 * kMiB);
  EXPECT_THAT(heap_.Allocate(2 * kMiB, "", own_), IsOk());
}

TEST_F(DeviceHeapTest, ThePeakIsOfTheTimeSinceItWasReset) {
  char* const data = Allocate(2 * kMiB);
  Allocate(kMiB);
  EXPECT_THAT(heap_.Free(data, own_), IsOk());
  EXPECT_EQ(heap_.GetStats().peak_bytes, 3 * kMiB);
  heap_.ResetPeak();
  EXPECT_EQ(heap_.GetStats().peak_bytes, kMiB);
}

}  // namespace
}  // namespace pinion
