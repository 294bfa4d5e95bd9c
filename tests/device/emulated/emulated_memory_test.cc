// Limits, reuse and reports of the emulated device's memory.

#include <sys/mman.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/allocation_label.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/tests/device/emulated/data_limit.h"
#include "pinion/tests/device/emulated/emulated_fixture.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace {

using ::pinion::testing::DataLimit;
using ::pinion::testing::IsOk;
using ::pinion::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class EmulatedMemoryTest : public EmulatedFixture {
 protected:
  EmulatedMemoryTest() { Start(kMiB); }

  void Start(uint64_t memory_bytes) {
    EmulatedOptions options = Options();
    options.memory_bytes = memory_bytes;
    EmulatedFixture::Start(options);
  }

  // Frees memory that out_ uses, and waits for out_.
  void AllocateAndReleaseLate(uint64_t size_bytes) {
    uint8_t* const data = OnDevice(size_bytes);
    Launch("long", {}, {{data, kKiB}}, out_, /*flops=*/1e9);
    ASSERT_THAT(machine_->RecordStream(data, out_), IsOk());
    ASSERT_THAT(Free(data), IsOk());
    Synchronize(out_);
  }
};

TEST_F(EmulatedMemoryTest, StatsFollowEveryByteAsCudasAllocatorCountsThem) {
  void* const a = OnDevice(1000);
  void* const b = OnDevice(500);
  EXPECT_EQ(Memory().in_use_bytes, 1536u);
  ASSERT_THAT(Free(a), IsOk());
  EXPECT_EQ(Memory().in_use_bytes, 512u);
  EXPECT_EQ(Memory().peak_bytes, 1536u);
  EXPECT_EQ(Memory().allocated_bytes, 1536u);
  machine_->ResetPeakMemory(0);
  EXPECT_EQ(Memory().peak_bytes, 512u);
  ASSERT_THAT(Free(b), IsOk());
  EXPECT_EQ(Memory().allocations, 2u);
  EXPECT_EQ(Memory().frees, 2u);
  EXPECT_EQ(Memory().limit_bytes, kMiB);
}

// Like strict overcommit (vm.overcommit_memory=2), this limit counts writable private memory.
TEST_F(EmulatedMemoryTest, MemoryThatNobodyAskedForCountsAgainstNoLimitOfTheHost) {
  const DataLimit limit(kGiB);
  const auto machine = EmulatedMachine::Create({});
  ASSERT_THAT(machine, IsOk());
  const std::shared_ptr<Device> device = (*machine)->device(0);
  const StreamHandle stream = (*machine)->default_stream(0);
  EXPECT_THAT(device->Allocate(64 * kMiB, stream), IsOk());
  EXPECT_THAT(device->Allocate(2 * kGiB, stream),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       AllOf(HasSubstr("the host refuses"), HasSubstr("vm.overcommit_memory"),
                             HasSubstr("EmulatedOptions::memory_bytes"))));
  EXPECT_THAT(device->Allocate(64 * kMiB, stream), IsOk());
}

TEST_F(EmulatedMemoryTest, OutOfMemorySaysWhoHoldsWhat) {
  {
    AllocationLabel label("weights");
    OnDevice(512 * kKiB);
    {
      AllocationLabel inner("aten::addmm");
      OnDevice(64 * kKiB);
    }
    OnDevice(64 * kKiB);
  }
  OnDevice(kKiB);
  EXPECT_THAT(device_->Allocate(512 * kKiB, compute_),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       AllOf(HasSubstr("emu:0"), HasSubstr("asked for 512 KiB"),
                             HasSubstr("in use 641 KiB of 1 MiB"),
                             HasSubstr("weights 640 KiB (3 allocations)"),
                             HasSubstr("(no label) 1 KiB (1 allocation)"))));
  EXPECT_EQ(Memory().in_use_bytes, 641 * kKiB);
}

TEST_F(EmulatedMemoryTest, AReportNamesTheLargestHolderFirst) {
  const std::pair<const char*, int> holders[] = {
      {"gradients", 1}, {"weights", 1025}, {"inputs", 600}};
  for (const auto& [name, size_bytes] : holders) {
    AllocationLabel label(name);
    OnDevice(size_bytes);
  }
  EXPECT_EQ(machine_->MemoryReport(0),
            "  weights 1.5 KiB (1 allocation)\n  inputs 1 KiB (1 allocation)\n"
            "  gradients 512 B (1 allocation)\n");
}

TEST_F(EmulatedMemoryTest, AnIdleStreamGetsItsLastFreedAddressFirst) {
  void* data[4];
  for (void*& d : data) d = OnDevice(kKiB);
  ASSERT_THAT(Free(data[2]), IsOk());
  ASSERT_THAT(Free(data[0]), IsOk());
  EXPECT_EQ(OnDevice(kKiB), data[0]);
}

TEST_F(EmulatedMemoryTest, WholeLimitCanBeUsedHoweverFragmented) {
  std::vector<void*> data;
  for (int i = 0; i < 1024; ++i) data.push_back(OnDevice(kKiB));
  for (int i = 0; i < 1024; i += 2) ASSERT_THAT(Free(data[i]), IsOk());
  EXPECT_THAT(device_->Allocate(512 * kKiB, compute_), IsOk());
  EXPECT_THAT(device_->Allocate(1, compute_), StatusIs(absl::StatusCode::kResourceExhausted));
}

TEST_F(EmulatedMemoryTest, LimitCanBeMovedAtRunTime) {
  void* const data = OnDevice(512 * kKiB);
  ASSERT_THAT(machine_->SetMemoryLimit(0, 256 * kKiB), IsOk());
  EXPECT_THAT(device_->Allocate(1, compute_), StatusIs(absl::StatusCode::kResourceExhausted));
  ASSERT_THAT(Free(data), IsOk());
  EXPECT_THAT(device_->Allocate(256 * kKiB, compute_), IsOk());
  ASSERT_THAT(machine_->SetMemoryLimit(0, 2 * kMiB), IsOk());
  EXPECT_THAT(device_->Allocate(kMiB, compute_), IsOk());
  EXPECT_THAT(machine_->SetMemoryLimit(0, 3 * kMiB), IsInvalid("3 MiB"));
}

TEST_F(EmulatedMemoryTest, DoubleFreeAndForeignPointersAreRefused) {
  uint8_t* const data = OnDevice(kKiB);
  EXPECT_THAT(Free(data + 1), StatusIs(absl::StatusCode::kInvalidArgument));
  ASSERT_THAT(Free(data), IsOk());
  EXPECT_THAT(Free(data), IsInvalid("twice"));
  EXPECT_THAT(machine_->RecordStream(data, out_), IsInvalid("freed?"));
  EXPECT_THAT(device_->Allocate(0, compute_), StatusIs(absl::StatusCode::kInvalidArgument));
}

TEST_F(EmulatedMemoryTest, UseAfterFreeIsRefusedByCopiesAndKernels) {
  uint8_t* const host = Pinned(kKiB);
  uint8_t* const data = OnDevice(kKiB);
  EXPECT_THAT(ToHost(host, data, kKiB + 1, compute_), IsInvalid("one live allocation"));
  ASSERT_THAT(Free(data), IsOk());
  EXPECT_THAT(ToHost(host, data, kKiB, compute_), StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_THAT(
      machine_->Launch(0, compute_, {.name = "aten::add", .reads = {{data, kKiB}}, .writes = {}}),
      IsInvalid("aten::add"));
}

TEST_F(EmulatedMemoryTest, AddressOfABusyStreamIsNotGivenToAnother) {
  uint8_t* const data = OnDevice(kKiB);
  Launch("long", {}, {{data, kKiB}}, compute_, /*flops=*/1e12);
  ASSERT_THAT(Free(data), IsOk());
  void* const other = device_->Allocate(kKiB, out_).value();
  EXPECT_NE(other, data);
  Synchronize(compute_);
  EXPECT_EQ(device_->Allocate(kKiB, out_).value(), data);  // complete, so reusable on any stream
}

TEST_F(EmulatedMemoryTest, RecordedStreamHoldsFreedMemoryUntilItGotThere) {
  Start(64 * kMiB);
  const auto [data, host] = MakeBuffers(32 * kMiB);
  Order(compute_, out_);
  ASSERT_THAT(ToHost(host, data, 32 * kMiB, out_), IsOk());
  ASSERT_THAT(machine_->RecordStream(data, out_), IsOk());
  ASSERT_THAT(Free(data), IsOk());
  EXPECT_THAT(machine_->races(), IsEmpty());
  EXPECT_EQ(Memory().in_use_bytes, 32 * kMiB);
  EXPECT_EQ(Memory().streams_recorded, 1u);
  EXPECT_THAT(machine_->MemoryReport(0), HasSubstr("recorded streams"));
  EXPECT_NE(OnDevice(kMiB), data);
  Synchronize(out_);
  EXPECT_EQ(machine_->MemoryReport(0), "  (no label) 1 MiB (1 allocation)\n");
  EXPECT_EQ(Memory().in_use_bytes, kMiB);
}

TEST_F(EmulatedMemoryTest, AllocationWaitsForRecordedStreamsBeforeItGivesUp) {
  const auto [data, host] = MakeBuffers(kMiB);
  Order(compute_, out_);
  ASSERT_THAT(ToHost(host, data, kMiB, out_), IsOk());
  ASSERT_THAT(machine_->RecordStream(data, out_), IsOk());
  ASSERT_THAT(Free(data), IsOk());
  const double before = machine_->now_ms();
  EXPECT_THAT(device_->Allocate(kMiB, compute_), IsOk());
  EXPECT_GT(machine_->now_ms() - before, 0.018);  // 1 MiB at 57.3 GB/s
}

TEST_F(EmulatedMemoryTest, APeakDoesNotCountWhatHasBeenReleasedMeanwhile) {
  AllocateAndReleaseLate(512 * kKiB);
  machine_->ResetPeakMemory(0);
  EXPECT_EQ(Memory().peak_bytes, 0u);
  AllocateAndReleaseLate(256 * kKiB);
  OnDevice(256 * kKiB);
  EXPECT_EQ(Memory().peak_bytes, 256 * kKiB);
}

TEST_F(EmulatedMemoryTest, ARecordedStreamIsOneOfMemoryThatIsAllocated) {
  uint8_t* const data = OnDevice(kKiB);
  EXPECT_THAT(machine_->RecordStream(data + kKiB - 1, out_), IsOk());
  EXPECT_THAT(machine_->RecordStream(data + kKiB, out_), IsInvalid("not allocated"));
  EXPECT_THAT(machine_->RecordStream(Pinned(kKiB), out_), IsInvalid("not device memory"));
}

TEST_F(EmulatedMemoryTest, PinnedMemoryIsKnownUntilItIsFreed) {
  uint8_t* const host = Pinned(8 * kKiB);
  void* const data = OnDevice(kKiB);
  int device = -1;
  EXPECT_TRUE(machine_->IsPinned(host));
  EXPECT_TRUE(machine_->IsPinned(host + 8 * kKiB - 1));
  EXPECT_FALSE(machine_->IsPinned(&device));
  EXPECT_EQ(source_->Allocate(8 * kKiB).value().numa_node, -1);
  EXPECT_FALSE(machine_->IsPinned(data));
  EXPECT_TRUE(machine_->IsDevicePointer(data, &device));
  EXPECT_EQ(device, 0);
  EXPECT_FALSE(machine_->IsDevicePointer(host, &device));
  ASSERT_THAT(source_->Free({host, 8 * kKiB, -1}), IsOk());
  EXPECT_FALSE(machine_->IsPinned(host));
  unsigned char resident[2] = {};
  EXPECT_EQ(mincore(host, 8 * kKiB, resident), -1) << "still mapped";
}

TEST_F(EmulatedMemoryTest, UnpinningWaitsForCopiesButReportsThatNobodyElseDid) {
  uint8_t* const host = Pinned(4 * kKiB);
  uint8_t* const data = OnDevice(4 * kKiB);
  Fill(data, 1, 4 * kKiB, compute_);
  ASSERT_THAT(ToHost(host, data, 4 * kKiB, compute_), IsOk());
  const double before = machine_->now_ms();
  ASSERT_THAT(source_->Free({host, 4 * kKiB, -1}), IsOk());
  EXPECT_GT(machine_->now_ms(), before);
  EXPECT_THAT(machine_->races(), ::testing::ElementsAre(HasSubstr("the unpinning")));
}

TEST(EmulatedMachineTest, PinnedMemoryThatTheHostDoesNotHaveIsRefused) {
  const auto machine = EmulatedMachine::Create({}).value();
  EXPECT_THAT(machine->device(0)->pinned_source()->Allocate(uint64_t{1} << 60),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       HasSubstr("the host has no 1 EiB for emulated pinned memory")));
}

TEST(EmulatedMachineTest, MoreMemoryThanThereAreAddressesForIsRefused) {
  EmulatedOptions options;
  EXPECT_EQ(options.memory_bytes, 8 * kGiB);
  options.device_count = 64;
  options.memory_bytes = uint64_t{1} << 40;
  EXPECT_THAT(EmulatedMachine::Create(options),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("of addresses for device")));
}

}  // namespace
}  // namespace pinion
