// CUDA's pitfalls, which the conformance suite does not cover; on the fake runtime. Copies,
// contexts and captures have their own files.

#include "pinion/device/cuda/cuda_device.h"

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/device/cuda/cuda_api.h"
#include "pinion/device/cuda/cuda_backend.h"
#include "pinion/device/cuda/cuda_calls.h"
#include "pinion/device/device.h"
#include "pinion/device/device_backend.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/tests/device/cuda/cuda_device_fixture.h"
#include "pinion/tests/device/cuda/fake_cuda.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace {

using ::pinion::testing::FakeCuda;
using ::pinion::testing::IsOk;
using ::pinion::testing::IsOkAndHolds;
using ::pinion::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

class CudaDeviceTest : public testing::CudaDeviceFixture {
 protected:
  const StreamHandle stream_ = device_.CreateStream("s").value();
};

// In peers a failed pin shows later, as an error of the GPU (vllm-omni#2748, OneTrainer#820).
TEST_F(CudaDeviceTest, AFailedPinLeavesNoErrorBehind) {
  fake_.FailNext("HostAlloc", cudaErrorMemoryAllocation);
  EXPECT_THAT(
      device_.pinned_source()->Allocate(2 * kMiB),
      StatusIs(absl::StatusCode::kResourceExhausted,
               AllOf(HasSubstr("cudaHostAlloc of 2 MiB"), HasSubstr("cudaErrorMemoryAllocation"))));
  EXPECT_EQ(LatchedError(), cudaSuccess);
}

TEST_F(CudaDeviceTest, OutOfMemoryLeavesNoErrorBehind) {
  EXPECT_THAT(device_.Allocate(kGiB, stream_), StatusIs(absl::StatusCode::kResourceExhausted,
                                                        AllOf(HasSubstr("cuda:1 cannot give 1 GiB"),
                                                              HasSubstr("64 MiB of 64 MiB"))));
  EXPECT_EQ(LatchedError(), cudaSuccess);
}

TEST_F(CudaDeviceTest, ARefusalIsTheCallsResult) {
  fake_.FailNext("MallocAsync", cudaErrorDevicesUnavailable);
  EXPECT_THAT(device_.Allocate(kMiB, stream_), StatusIs(absl::StatusCode::kUnavailable));
  fake_.FailNext("MemGetInfo", cudaErrorDevicesUnavailable);
  EXPECT_THAT(device_.Allocate(kGiB, stream_), StatusIs(absl::StatusCode::kUnavailable));
  fake_.FailNext("StreamIsCapturing", cudaErrorDevicesUnavailable);
  EXPECT_THAT(device_.IsCapturing(stream_), StatusIs(absl::StatusCode::kUnavailable));
}

TEST_F(CudaDeviceTest, AnEventThatIsNotReadyLeavesNoErrorBehind) {
  const EventHandle event = EventBehindLongWork(stream_);
  EXPECT_THAT(device_.QueryEvent(event), IsOkAndHolds(false));
  EXPECT_EQ(LatchedError(), cudaSuccess);
}

TEST_F(CudaDeviceTest, ATimeOfAnEventThatIsNotDoneLeavesNoErrorBehind) {
  const EventHandle before = device_.CreateTimedEvent().value();
  const EventHandle after = device_.CreateTimedEvent().value();
  ASSERT_THAT(device_.RecordEvent(before, stream_), IsOk());
  EventBehindLongWork(stream_);
  ASSERT_THAT(device_.RecordEvent(after, stream_), IsOk());
  EXPECT_THAT(device_.ElapsedMs(before, after),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("one of the events is not done")));
  EXPECT_EQ(LatchedError(), cudaSuccess);
}

TEST_F(CudaDeviceTest, AStickyErrorIsInternalFromThenOn) {
  fake_.FailNext("EventCreateWithFlags", cudaErrorIllegalAddress);
  EXPECT_THAT(device_.CreateEvent(), StatusIs(absl::StatusCode::kInternal,
                                              AllOf(HasSubstr("cudaEventCreateWithFlags on cuda:1"),
                                                    HasSubstr("cudaErrorIllegalAddress"))));
  EXPECT_THAT(device_.CreateEvent(), StatusIs(absl::StatusCode::kInternal));
  EXPECT_THAT(device_.CreateStream("s"), StatusIs(absl::StatusCode::kInternal));
}

TEST_F(CudaDeviceTest, TheStreamPerThreadIsRefusedByName) {
  const StreamHandle per_thread(cudaStreamPerThread);
  const auto refusal = StatusIs(absl::StatusCode::kInvalidArgument,
                                HasSubstr("cudaStreamPerThread is another stream on each thread"));
  EXPECT_THAT(device_.RecordEvent(device_.CreateEvent().value(), per_thread), refusal);
  EXPECT_THAT(device_.IsCapturing(per_thread), refusal);
}

TEST_F(CudaDeviceTest, AHandleThatNamesNothingIsRefusedBeforeAnyCall) {
  const EventHandle event = device_.CreateEvent().value();
  const CopyPiece piece;
  const uint64_t calls = fake_.all_calls();
  for (const absl::Status& refused :
       {device_.Allocate(kKiB, {}).status(), device_.Free(nullptr, {}), device_.DestroyStream({}),
        device_.SynchronizeStream({}), device_.IsCapturing({}).status(),
        device_.RecordEvent(event, {}), device_.StreamWaitEvent({}, event),
        device_.CopyAsync(CopyDirection::kHostToDevice, {&piece, 1}, {})}) {
    EXPECT_THAT(refused, StatusIs(absl::StatusCode::kInvalidArgument,
                                  HasSubstr("StreamHandle names no stream: pass one that")));
  }
  for (const absl::Status& refused :
       {device_.DestroyEvent({}), device_.RecordEvent({}, stream_),
        device_.StreamWaitEvent(stream_, {}), device_.QueryEvent({}).status(),
        device_.WaitEvent({}, absl::ZeroDuration()), device_.ElapsedMs({}, event).status(),
        device_.ElapsedMs(event, {}).status()}) {
    EXPECT_THAT(refused, StatusIs(absl::StatusCode::kInvalidArgument,
                                  HasSubstr("EventHandle names no event: pass one that")));
  }
  EXPECT_THAT(device_.Allocate(0, stream_),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("size_bytes is 0: ask for")));
  EXPECT_EQ(fake_.all_calls(), calls);
}

TEST_F(CudaDeviceTest, WhatIsFreedAndDestroyedIsGone) {
  void* const data = device_.Allocate(kMiB, stream_).value();
  const EventHandle event = device_.CreateEvent().value();
  const HostSegment segment = device_.pinned_source()->Allocate(2 * kMiB).value();
  EXPECT_THAT(device_.Free(data, stream_), IsOk());
  EXPECT_THAT(device_.DestroyEvent(event), IsOk());
  EXPECT_THAT(device_.DestroyStream(stream_), IsOk());
  EXPECT_THAT(device_.pinned_source()->Free(segment), IsOk());
  EXPECT_EQ(fake_.machine().memory_stats(1).in_use_bytes, 0u);
  EXPECT_EQ(fake_.live_handles(), 0u);
  EXPECT_EQ(fake_.live_segments(), 0u);
}

TEST_F(CudaDeviceTest, WhereItCannotBeMadeCurrentNothingIsPinnedOrUnpinned) {
  const std::shared_ptr<HostMemorySource> source = device_.pinned_source();
  fake_.FailNext("GetDevice", cudaErrorInitializationError);
  EXPECT_FALSE(source->Allocate(2 * kMiB).ok());
  EXPECT_EQ(fake_.calls("HostAlloc"), 0);
  const HostSegment segment = source->Allocate(2 * kMiB).value();
  EXPECT_EQ(segment.numa_node, -1);
  fake_.FailNext("GetDevice", cudaErrorInitializationError);
  EXPECT_FALSE(source->Free(segment).ok());
  EXPECT_EQ(fake_.calls("FreeHost"), 0);
  EXPECT_THAT(source->Free(segment), IsOk());
}

TEST_F(CudaDeviceTest, MemoryThatCameUnalignedOnceIsAskedForWithRoomToAlignIt) {
  fake_.AlignToPagesOnly();
  for (int i = 0; i < 3; ++i) {
    const HostSegment segment = device_.pinned_source()->Allocate(2 * kMiB).value();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(segment.data) % (2 * kMiB), 0u);
    EXPECT_EQ(segment.numa_node, -1) << "CUDA does not tell";
    EXPECT_TRUE(fake_.machine().IsPinned(segment.data));
    EXPECT_TRUE(fake_.machine().IsPinned(static_cast<char*>(segment.data) + 2 * kMiB - 1));
  }
  EXPECT_EQ(fake_.calls("HostAlloc"), 4) << "the first one was pinned twice";
  EXPECT_THAT(device_.pinned_source()->Allocate(UINT64_MAX - 2 * kMiB + 1),
              StatusIs(absl::StatusCode::kResourceExhausted));
}

TEST_F(CudaDeviceTest, MemoryThatCameUnalignedAndCannotBeUnpinnedIsAnError) {
  fake_.AlignToPagesOnly();
  fake_.FailNext("FreeHost", cudaErrorInvalidValue);
  EXPECT_THAT(device_.pinned_source()->Allocate(2 * kMiB),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("cudaFreeHost of 2 MiB")));
  EXPECT_EQ(fake_.live_segments(), 1u);
  const HostSegment segment = device_.pinned_source()->Allocate(2 * kMiB).value();
  EXPECT_EQ(fake_.live_segments(), 1u) << "the next call unpins it";
  EXPECT_THAT(device_.pinned_source()->Free(segment), IsOk());
}

TEST_F(CudaDeviceTest, MemoryThatCameUnalignedStaysKnownUntilItIsUnpinned) {
  fake_.AlignToPagesOnly();
  const auto fail = [this] { fake_.FailNext("FreeHost", cudaErrorInvalidValue); };
  fail();
  EXPECT_FALSE(device_.pinned_source()->Allocate(2 * kMiB).ok());
  fail();
  const HostSegment segment = device_.pinned_source()->Allocate(2 * kMiB).value();
  EXPECT_EQ(fake_.live_segments(), 2u);
  EXPECT_THAT(device_.pinned_source()->Free(segment), IsOk());
  EXPECT_EQ(fake_.live_segments(), 0u);
}

TEST_F(CudaDeviceTest, MemoryThatCameUnalignedAndIsNotFreedAtOnceIsFreedTheNextTime) {
  fake_.AlignToPagesOnly();
  const std::shared_ptr<HostMemorySource> source = device_.pinned_source();
  const HostSegment segment = source->Allocate(2 * kMiB).value();
  fake_.FailNext("FreeHost", cudaErrorInvalidValue);
  EXPECT_THAT(source->Free(segment),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("cudaFreeHost of 4 MiB")));
  EXPECT_TRUE(fake_.machine().IsPinned(segment.data));
  EXPECT_THAT(source->Free(segment), IsOk());
  EXPECT_FALSE(fake_.machine().IsPinned(segment.data));
}

TEST_F(CudaDeviceTest, ASegmentThatIsNoPositiveMultipleOfTheGranularityIsRefused) {
  const int calls = fake_.calls("HostAlloc");
  for (const uint64_t size_bytes : {uint64_t{0}, kMiB, 2 * kMiB + 1}) {
    EXPECT_THAT(device_.pinned_source()->Allocate(size_bytes),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         AllOf(HasSubstr(std::to_string(size_bytes) + " bytes are no"),
                               HasSubstr("ask for a positive multiple of granularity_bytes()"))));
  }
  EXPECT_EQ(fake_.calls("HostAlloc"), calls);
}

TEST_F(CudaDeviceTest, OnlyASegmentInUseIsFreedAndOnlyOnce) {
  for (const bool pages_only : {false, true}) {
    if (pages_only) fake_.AlignToPagesOnly();
    const std::shared_ptr<HostMemorySource> source = device_.pinned_source();
    const HostSegment segment = source->Allocate(4 * kMiB).value();
    char* const data = static_cast<char*>(segment.data);
    const int calls = fake_.calls("FreeHost");
    const auto refused =
        StatusIs(absl::StatusCode::kInvalidArgument,
                 AllOf(HasSubstr("in use at 0x"), HasSubstr("unchanged and once")));
    for (const HostSegment& wrong :
         {HostSegment{}, HostSegment{nullptr, 4 * kMiB}, HostSegment{data, 2 * kMiB},
          HostSegment{data, 6 * kMiB}, HostSegment{data + 2 * kMiB, 2 * kMiB}}) {
      EXPECT_THAT(source->Free(wrong), refused);
    }
    EXPECT_EQ(fake_.calls("FreeHost"), calls);
    EXPECT_THAT(source->Free(segment), IsOk());
    EXPECT_THAT(source->Free(segment), refused);
    EXPECT_EQ(fake_.live_segments(), 0u);
  }
}

TEST_F(CudaDeviceTest, WaitingForAStuckEventEndsWithDeadlineExceeded) {
  const EventHandle event = EventBehindLongWork(stream_);
  EXPECT_THAT(device_.WaitEvent(event, absl::Milliseconds(3)),
              StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("cuda:1")));
}

TEST_F(CudaDeviceTest, ErrorsMeanWhatTheDeviceInterfaceSays) {
  const auto code = [](cudaError_t error) {
    return CudaStatus(FakeCuda::Api(), error, "what").code();
  };
  EXPECT_EQ(code(cudaSuccess), absl::StatusCode::kOk);
  EXPECT_EQ(code(cudaErrorMemoryAllocation), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(code(cudaErrorDevicesUnavailable), absl::StatusCode::kUnavailable);
  EXPECT_EQ(code(cudaErrorInvalidValue), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(cudaErrorStreamCaptureUnsupported), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(code(cudaErrorCallRequiresNewerDriver), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(code(cudaErrorInsufficientDriver), absl::StatusCode::kNotFound);
  EXPECT_EQ(code(cudaErrorIllegalAddress), absl::StatusCode::kInternal);
  EXPECT_EQ(code(cudaErrorECCUncorrectable), absl::StatusCode::kInternal);
  EXPECT_EQ(code(cudaErrorUnknown), absl::StatusCode::kInternal);
}

TEST_F(CudaDeviceTest, WhatSysfsDoesNotKnowOfTheLinkStaysUnknown) {
  const DeviceInfo info = device_.info();
  EXPECT_EQ(info.model, fake_.machine().device(1)->info().model);
  EXPECT_EQ(info.link, LinkKind::kUnknown);
  EXPECT_EQ(info.link_name, "");
  EXPECT_EQ(info.rated_gb_per_s, 0);
  EXPECT_EQ(info.numa_node, -1);
  EXPECT_FALSE(info.modelled);
  EXPECT_EQ(LatchedError(), cudaSuccess);
}

TEST_F(CudaDeviceTest, WhatSysfsKnowsOfTheLinkIsTold) {
  // The bus id is a path that leads to this directory instead of the real one in sysfs.
  static const std::string bus_id = "../../../../tmp/pci" + std::to_string(getpid());
  const std::string folder = "/sys/bus/pci/devices/" + bus_id;
  std::error_code error;
  if (!std::filesystem::create_directory(folder, error)) {
    GTEST_SKIP() << "this host has no PCI devices: " << error.message();
  }
  std::ofstream(folder + "/max_link_speed") << "32.0 GT/s PCIe";
  std::ofstream(folder + "/max_link_width") << "16";
  CudaApi api = FakeCuda::Api();
  api.DeviceGetPCIBusId = [](char* text, int size, int device) {
    EXPECT_EQ(device, 1);
    EXPECT_LT(bus_id.copy(text, size), static_cast<size_t>(size));
    return cudaSuccess;
  };
  const DeviceInfo info = CudaDevice(api, 1).info();
  EXPECT_EQ(info.link, LinkKind::kPcie);
  EXPECT_EQ(info.link_name, "PCIe 5 x16");
  std::filesystem::remove_all(folder);
}

TEST_F(CudaDeviceTest, ADeviceThatCannotBeAskedIsUnknownAndLeavesNoErrorBehind) {
  fake_.FailNext("GetDeviceProperties", cudaErrorInvalidDevice);
  fake_.FailNext("DeviceGetAttribute", cudaErrorInvalidValue);
  EXPECT_EQ(device_.info().model, "");
  EXPECT_EQ(LatchedError(), cudaSuccess);
}

TEST(CudaDeviceInfoTest, ADeviceThatReadsTheHostsPageTablesHangsOnNvlinkC2c) {
  const std::pair<const char*, int> presets[] = {{"gh200_c2c", 450}, {"gb200_c2c", 225}};
  for (const auto& [preset, gb_per_s] : presets) {
    EmulatedOptions options;
    options.preset = *FindPreset(preset);
    FakeCuda fake(options);
    const CudaDevice device(FakeCuda::Api(), 0);
    EXPECT_EQ(device.info().link, LinkKind::kNvlinkC2c);
    EXPECT_EQ(device.info().link_name, "NVLink-C2C");
    EXPECT_EQ(device.info().rated_gb_per_s, gb_per_s);
    fake.FailNext("GetDeviceProperties", cudaErrorInvalidDevice);
    EXPECT_EQ(device.info().rated_gb_per_s, 0) << "whose generation is unknown";
  }
}

// On GB10 and Jetson, a copy to the host would free no memory.
TEST(CudaDeviceInfoTest, AnIntegratedDeviceHasTheHostsMemoryAndNoLink) {
  EmulatedOptions options;
  options.preset = *FindPreset("gh200_c2c");
  FakeCuda fake(options);
  const CudaDevice device(FakeCuda::Api(), 0);
  fake.SetIntegrated();
  const DeviceInfo info = device.info();
  EXPECT_EQ(info.link, LinkKind::kNone);
  EXPECT_EQ(info.rated_gb_per_s, 0);
  EXPECT_EQ(info.link_name, "none: the device's memory is the host's");
}

TEST_F(CudaDeviceTest, TheBackendHandsOutDevicesThatExist) {
  const DeviceBackend backend = CudaBackend(FakeCuda::Api());
  EXPECT_THAT(backend.device(0), IsOk());
  EXPECT_EQ(backend.type_name, "cuda");
  EXPECT_THAT(CudaDeviceCount(FakeCuda::Api()), IsOkAndHolds(2));
  const absl::StatusOr<std::shared_ptr<Device>> device = backend.device(1);
  ASSERT_THAT(device, IsOk());
  EXPECT_EQ((*device)->name(), "cuda:1");
  EXPECT_THAT(backend.device(2),
              StatusIs(absl::StatusCode::kNotFound,
                       AllOf(HasSubstr("cuda:2"), HasSubstr("2 device(s): pass 0 to 1"))));
  EXPECT_THAT(backend.device(-1), StatusIs(absl::StatusCode::kNotFound, HasSubstr("cuda:-1")));
}

// The table of a program that has set only some functions.
TEST(CudaApiMisuseTest, AFunctionThatIsMissingIsRefusedWithTheRemedy) {
  const FakeCuda fake{EmulatedOptions()};
  CudaApi api = FakeCuda::Api();
  api.MemcpyAsync = nullptr;
  const CudaApi none = {};
  for (const CudaApi& wrong : {api, none}) {
    const auto refused =
        StatusIs(absl::StatusCode::kInvalidArgument,
                 AllOf(HasSubstr("of CudaApi are null"), HasSubstr("RealCudaApi()")));
    EXPECT_THAT(CudaBackend(wrong).device(0), refused);
    EXPECT_THAT(CudaDeviceCount(wrong), refused);
    EXPECT_DEATH(CudaPinnedSource(wrong, 0), "of CudaApi are null");
    EXPECT_DEATH(CudaDevice(wrong, 0), "of CudaApi are null");
  }
}

TEST(CudaDeviceCountTest, OneDeviceIsEnough) {
  const FakeCuda fake{EmulatedOptions()};
  EXPECT_THAT(CudaDeviceCount(FakeCuda::Api()), IsOkAndHolds(1));
}

TEST_F(CudaDeviceTest, NoDevicesAreADriverThatIsMissingAndAnErrorIsItself) {
  CudaApi api = FakeCuda::Api();
  api.GetDeviceCount = [](int* count) {
    *count = 0;
    return cudaSuccess;
  };
  EXPECT_THAT(CudaDeviceCount(api), StatusIs(absl::StatusCode::kNotFound,
                                             HasSubstr("an NVIDIA driver for CUDA " +
                                                       std::to_string(CUDART_VERSION / 1000))));
  api.GetDeviceCount = [](int* count) {
    *count = 1;
    return cudaErrorECCUncorrectable;
  };
  EXPECT_THAT(CudaDeviceCount(api),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("counting the CUDA devices")));
}

TEST_F(CudaDeviceTest, WithoutADriverTheBackendSaysWhatIsMissing) {
  fake_.SetNoDriver();
  EXPECT_THAT(
      CudaBackend(FakeCuda::Api()).device(0),
      StatusIs(absl::StatusCode::kNotFound,
               AllOf(HasSubstr("NVIDIA driver"), HasSubstr("cudaErrorInsufficientDriver"))));
  EXPECT_EQ(LatchedError(), cudaSuccess);
}

}  // namespace
}  // namespace pinion
