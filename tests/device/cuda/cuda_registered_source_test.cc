#include "pinion/device/cuda/cuda_registered_source.h"

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/allocator/sources/mmap_source.h"
#include "pinion/device/cuda/cuda_api.h"
#include "pinion/device/cuda/cuda_device.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/tests/device/cuda/copy_across_border.h"
#include "pinion/tests/device/cuda/fake_cuda.h"
#include "pinion/tests/support/fake_host.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace {

using ::pinion::testing::FakeCuda;
using ::pinion::testing::FakeHost;
using ::pinion::testing::IsOk;
using ::pinion::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

EmulatedOptions MachineOptions() {
  EmulatedOptions options;
  options.device_count = 2;
  options.memory_bytes = 64 * kMiB;
  options.abort_on_race = false;
  return options;
}

// Large segments then reserve only address space.
MmapOptions Untouched() {
  MmapOptions options;
  options.touch_threads = 0;
  return options;
}

class CudaRegisteredSourceTest : public ::testing::Test {
 protected:
  CudaRegisteredSourceTest()
      : fake_(MachineOptions()),
        source_(CudaRegisteredSource::Create(FakeCuda::Api(), 1, Untouched()).value()) {}

  FakeCuda fake_;
  std::shared_ptr<CudaRegisteredSource> source_;
};

TEST_F(CudaRegisteredSourceTest, AnAllocatorGetsPinnedMemoryFromIt) {
  AllocatorOptions options;
  options.segment_bytes = 2 * kMiB;
  PINION_ASSERT_OK_AND_ASSIGN(std::shared_ptr<PinnedAllocator> allocator,
                              PinnedAllocator::Create(options, source_, FakeHost().Probe()));
  PINION_ASSERT_OK_AND_ASSIGN(PinnedBlock block, allocator->Allocate(kMiB));
  EXPECT_TRUE(fake_.machine().IsPinned(block.data()));
  EXPECT_EQ(fake_.live_segments(), 1u);
  block = PinnedBlock();
  EXPECT_THAT(allocator->Trim(0), IsOk());
  EXPECT_EQ(fake_.live_segments(), 0u);
}

// One call for 700 GB held a host-wide driver lock for 12 minutes (TensorRT-LLM#17773). One for 512
// GiB fails (maru#64, vLLM#51080).
TEST_F(CudaRegisteredSourceTest, OneCallRegistersAGibibyteAtMost) {
  const uint64_t size_bytes = 2 * kGiB + 2 * kMiB;
  PINION_ASSERT_OK_AND_ASSIGN(const HostSegment segment, source_->Allocate(size_bytes));
  const int calls = fake_.calls("HostRegister");
  EXPECT_GE(calls, 3);
  EXPECT_LE(calls, 4);
  char* const data = static_cast<char*>(segment.data);
  EXPECT_TRUE(fake_.machine().IsPinned(data));
  EXPECT_TRUE(fake_.machine().IsPinned(data + kGiB));
  EXPECT_TRUE(fake_.machine().IsPinned(data + size_bytes - 1));
  EXPECT_FALSE(fake_.machine().IsPinned(data + size_bytes));
  EXPECT_THAT(source_->Free(segment), IsOk());
  EXPECT_EQ(fake_.calls("HostUnregister"), calls);
  EXPECT_EQ(fake_.live_segments(), 0u);
}

TEST_F(CudaRegisteredSourceTest, ASegmentOfAGibibyteIsOneRegistrationWhereverItLies) {
  PINION_ASSERT_OK_AND_ASSIGN(const HostSegment before, source_->Allocate(2 * kMiB));
  PINION_ASSERT_OK_AND_ASSIGN(const HostSegment segment, source_->Allocate(kGiB));
  EXPECT_EQ(fake_.calls("HostRegister"), 2);
  EXPECT_THAT(source_->Free(segment), IsOk());
  EXPECT_THAT(source_->Free(before), IsOk());
}

// Copies are split at multiples of a gibibyte.
TEST_F(CudaRegisteredSourceTest, AllButTheFirstRegistrationOfASegmentBeginAtAMultipleOfAGibibyte) {
  static std::vector<const void*> registered;
  CudaApi api = FakeCuda::Api();
  api.HostRegister = [](void* data, size_t size_bytes, unsigned int flags) {
    registered.push_back(data);
    return FakeCuda::Api().HostRegister(data, size_bytes, flags);
  };
  const auto source = CudaRegisteredSource::Create(api, 1, Untouched()).value();
  PINION_ASSERT_OK_AND_ASSIGN(const HostSegment before, source->Allocate(2 * kMiB));
  registered.clear();
  PINION_ASSERT_OK_AND_ASSIGN(const HostSegment segment, source->Allocate(2 * kGiB + 4 * kMiB));
  ASSERT_GE(registered.size(), 3u);
  EXPECT_EQ(registered.front(), segment.data);
  for (size_t i = 1; i < registered.size(); ++i) EXPECT_TRUE(source->JoinsAt(registered[i])) << i;
  EXPECT_THAT(source->Free(segment), IsOk());
  EXPECT_THAT(source->Free(before), IsOk());
}

// In another library cudaMemcpyBatchAsync failed for a page that spanned two registrations
// (sglang#36798).
TEST_F(CudaRegisteredSourceTest, ACopyMaySpanTwoRegistrations) {
  PINION_ASSERT_OK_AND_ASSIGN(const HostSegment segment, source_->Allocate(kGiB + 4 * kMiB));
  testing::ExpectCopyAcrossBorder(FakeCuda::Api(), 1, segment, 64 * kKiB);
  EXPECT_EQ(fake_.calls("MemcpyAsync"), 4) << "in and out, of two parts each";
  EXPECT_THAT(source_->Free(segment), IsOk());
  EXPECT_THAT(fake_.machine().races(), IsEmpty());
}

// In another library a failed registration was ignored, and the next kernel launch reported its
// latched error (maru#64, vLLM#51081).
TEST_F(CudaRegisteredSourceTest, AFailedRegistrationTakesBackTheEarlierOnes) {
  for (const int good_calls : {0, 1, 2}) {
    SCOPED_TRACE(good_calls);
    // Each Register first calls GetDevice, HasContext and PushContext once.
    fake_.FailCall(4 + good_calls, cudaErrorMemoryAllocation);
    EXPECT_THAT(source_->Allocate(3 * kGiB),
                StatusIs(absl::StatusCode::kResourceExhausted,
                         AllOf(HasSubstr("cudaHostRegister of"), HasSubstr("segment of 3 GiB"),
                               HasSubstr("cudaErrorMemoryAllocation"))));
    EXPECT_EQ(fake_.live_segments(), 0u);
    EXPECT_EQ(FakeCuda::Api().GetLastError(), cudaSuccess);
  }
}

TEST_F(CudaRegisteredSourceTest, WhatIsFreedAndWhatCannotBeRegisteredGivesItsAddressesBack) {
  PINION_ASSERT_OK_AND_ASSIGN(const HostSegment freed, source_->Allocate(2 * kMiB));
  EXPECT_THAT(source_->Free(freed), IsOk());
  fake_.FailNext("HostRegister", cudaErrorMemoryAllocation);
  EXPECT_THAT(source_->Allocate(2 * kMiB), Not(IsOk()));
  PINION_ASSERT_OK_AND_ASSIGN(const HostSegment segment, source_->Allocate(2 * kMiB));
  EXPECT_EQ(segment.data, freed.data);
  EXPECT_THAT(source_->Free(segment), IsOk());
}

TEST_F(CudaRegisteredSourceTest, AnErrorWhileUnregisteringKeepsTheAddressesTaken) {
  PINION_ASSERT_OK_AND_ASSIGN(const HostSegment segment, source_->Allocate(2 * kMiB));
  fake_.FailNext("HostUnregister", cudaErrorInvalidValue);
  EXPECT_THAT(source_->Free(segment),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("cudaHostUnregister")));
  std::memset(segment.data, 1, segment.size_bytes);  // still mapped
  EXPECT_THAT(source_->Free(segment), IsOk());
}

TEST_F(CudaRegisteredSourceTest, WithoutItsDeviceNothingIsRegistered) {
  fake_.FailNext("GetDevice", cudaErrorInitializationError);
  EXPECT_THAT(source_->Allocate(2 * kMiB), Not(IsOk()));
  EXPECT_EQ(fake_.calls("HostRegister"), 0);
}

TEST_F(CudaRegisteredSourceTest, WithoutItsDeviceNothingIsUnregistered) {
  PINION_ASSERT_OK_AND_ASSIGN(const HostSegment segment, source_->Allocate(2 * kMiB));
  fake_.FailNext("GetDevice", cudaErrorInitializationError);
  EXPECT_THAT(source_->Free(segment), Not(IsOk()));
  EXPECT_TRUE(fake_.machine().IsPinned(segment.data));
  EXPECT_THAT(source_->Free(segment), IsOk());
}

TEST_F(CudaRegisteredSourceTest, SegmentsJoinWhereRegistrationsBegin) {
  const auto address = [](uintptr_t value) { return reinterpret_cast<const void*>(value); };
  EXPECT_TRUE(source_->JoinsAt(address(3 * kGiB)));
  EXPECT_FALSE(source_->JoinsAt(address(3 * kGiB + 1)));
  EXPECT_FALSE(source_->JoinsAt(address(3 * kGiB + 2 * kMiB)));
}

TEST_F(CudaRegisteredSourceTest, NobodysCaptureIsSpoiledAndNoDeviceStaysCurrent) {
  CudaDevice device(FakeCuda::Api(), 1);
  fake_.SetCapturing(device.CreateStream("captured").value(), true);
  PINION_ASSERT_OK_AND_ASSIGN(const HostSegment segment, source_->Allocate(2 * kMiB));
  EXPECT_THAT(source_->Free(segment), IsOk());
  EXPECT_FALSE(fake_.capture_spoiled());
  int current = -1;
  EXPECT_EQ(FakeCuda::Api().GetDevice(&current), cudaSuccess);
  EXPECT_EQ(current, 0);
}

// In another library batched copies used the host address as the device address (sglang#40232).
TEST_F(CudaRegisteredSourceTest, ADeviceThatSeesItElsewhereIsRefused) {
  fake_.SetRegisteredElsewhere();
  EXPECT_THAT(CudaRegisteredSource::Create(FakeCuda::Api(), 1),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("cuda:1"), HasSubstr("CudaPinnedSource"))));
}

// On such devices cudaHostRegister succeeds without locking, so every copy would be pageable.
TEST(CudaRegisteredSourceOnGh200Test, ADeviceThatReadsTheHostsPageTablesIsRefused) {
  EmulatedOptions options;
  options.preset = *FindPreset("gh200_c2c");
  const FakeCuda fake(options);
  EXPECT_THAT(CudaRegisteredSource::Create(FakeCuda::Api(), 0),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("cuda:0"), HasSubstr("does not lock pages"),
                             HasSubstr("CudaPinnedSource"))));
}

// Messages and statistics show the name.
TEST_F(CudaRegisteredSourceTest, SourcesAreNamedAfterTheCallThatPins) {
  EXPECT_EQ(source_->name(), "cudaHostRegister");
  EXPECT_EQ(CudaDevice(FakeCuda::Api(), 1).pinned_source()->name(), "cudaHostAlloc");
}

TEST_F(CudaRegisteredSourceTest, ADeviceThatDoesNotTellWhatItIsIsRefused) {
  fake_.FailNext("DeviceGetAttribute", cudaErrorInvalidDevice);
  EXPECT_THAT(
      CudaRegisteredSource::Create(FakeCuda::Api(), 1),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("cudaDeviceGetAttribute on cuda:1")));
}

TEST_F(CudaRegisteredSourceTest, BadOptionsAreRefused) {
  MmapOptions options;
  options.touch_threads = -1;
  EXPECT_THAT(CudaRegisteredSource::Create(FakeCuda::Api(), 1, options),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("touch_threads is -1")));
}

TEST_F(CudaRegisteredSourceTest, AForkedChildLeavesTheMemoryToItsParent) {
  GTEST_FLAG_SET(death_test_style, "fast");
  PINION_ASSERT_OK_AND_ASSIGN(const HostSegment segment, source_->Allocate(2 * kMiB));
  EXPECT_EXIT(_exit(source_->Free(segment).ok() && fake_.calls("HostUnregister") == 0 ? 0 : 1),
              ::testing::ExitedWithCode(0), "");
  EXPECT_THAT(source_->Free(segment), IsOk());
  EXPECT_EQ(fake_.calls("HostUnregister"), 1);
}

}  // namespace
}  // namespace pinion
