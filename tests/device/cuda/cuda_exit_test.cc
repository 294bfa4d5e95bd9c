// Pinned memory in globals at process exit and in children of fork().

#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <memory>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/device/cuda/cuda_api.h"
#include "pinion/device/cuda/cuda_device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/tests/device/cuda/fake_cuda.h"
#include "pinion/tests/support/fake_host.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace {

using ::pinion::testing::FakeCuda;
using ::pinion::testing::FakeHost;
using ::pinion::testing::IsOk;

// Returns a runtime whose cudaFreeHost exits with 3.
const CudaApi& ApiThatMustNotFree() {
  static const CudaApi api = [] {
    CudaApi strict = FakeCuda::Api();
    strict.FreeHost = [](void*) -> cudaError_t { _exit(3); };
    return strict;
  }();
  return api;
}

// Globals, as in a program: destroyed after main.
std::shared_ptr<PinnedAllocator> global_allocator;
PinnedBlock global_block;

[[noreturn]] void ExitWithPinnedMemory() {
  new FakeCuda(EmulatedOptions());  // a program never unloads the runtime
  AllocatorOptions options;
  options.segment_bytes = 2 * kMiB;
  global_allocator =
      PinnedAllocator::Create(options, std::make_shared<CudaPinnedSource>(ApiThatMustNotFree(), 0),
                              FakeHost().Probe())
          .value();
  global_block = global_allocator->Allocate(kMiB).value();
  std::exit(0);
}

TEST(CudaExitDeathTest, AGlobalAllocatorLeavesItsMemoryToTheOperatingSystem) {
  EXPECT_EXIT(ExitWithPinnedMemory(), ::testing::ExitedWithCode(0), "");
}

// State for the exit handler, which runs while the process exits.
FakeCuda* runtime = nullptr;  // never unloaded
std::shared_ptr<HostMemorySource> late_source;
HostSegment late_segment;

// Exits with 0 if Allocate in an exit handler fails, Free succeeds, and neither of them calls the
// runtime.
[[noreturn]] void ExitAndPin() {
  std::atexit([] {
    const uint64_t calls = runtime->all_calls();
    const absl::Status refused = late_source->Allocate(64 * kMiB).status();
    const bool clear =
        absl::IsFailedPrecondition(refused) && absl::StrContains(refused.message(), "exiting");
    const bool freed = late_source->Free(late_segment).ok();
    _exit(clear && freed && runtime->all_calls() == calls ? 0 : 1);
  });
  runtime = new FakeCuda(EmulatedOptions());
  late_source = std::make_shared<CudaPinnedSource>(FakeCuda::Api(), 0);
  late_segment = late_source->Allocate(2 * kMiB).value();
  std::exit(2);
}

TEST(CudaExitDeathTest, WhileTheProcessExitsNothingIsPinnedOrUnpinned) {
  EXPECT_EXIT(ExitAndPin(), ::testing::ExitedWithCode(0), "");
}

TEST(CudaExitDeathTest, AForkedChildIsGivenNone) {
  GTEST_FLAG_SET(death_test_style, "fast");
  FakeCuda fake{EmulatedOptions()};
  CudaPinnedSource source(FakeCuda::Api(), 0);
  EXPECT_EXIT(
      _exit(absl::IsFailedPrecondition(source.Allocate(2 * kMiB).status()) && fake.all_calls() == 0
                ? 0
                : 1),
      ::testing::ExitedWithCode(0), "");
}

TEST(CudaExitDeathTest, AForkedChildLeavesTheMemoryToItsParent) {
  GTEST_FLAG_SET(death_test_style, "fast");
  FakeCuda fake{EmulatedOptions()};
  CudaPinnedSource source(FakeCuda::Api(), 0);
  const HostSegment segment = source.Allocate(2 * kMiB).value();
  EXPECT_EXIT(_exit(source.Free(segment).ok() && fake.calls("FreeHost") == 0 ? 0 : 1),
              ::testing::ExitedWithCode(0), "");
  EXPECT_THAT(source.Free(segment), IsOk());
  EXPECT_EQ(fake.calls("FreeHost"), 1);
}

}  // namespace
}  // namespace pinion
