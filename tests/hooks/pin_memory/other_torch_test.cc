// Checks that Pinion leaves a LibTorch release alone for which it was not compiled.

#include <cstdint>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/device/device_backend.h"
#include "pinion/hooks/pin_memory/torch_host_allocator.h"
#include "pinion/tests/support/status_matchers.h"

// The program's own function overrides the library's and reports another release.
extern "C" uint64_t aoti_torch_abi_version() {
  return uint64_t{2} << 56 | uint64_t{99} << 48 | uint64_t{1} << 40;
}

namespace pinion::testing {
namespace {

TEST(OtherTorch, ItsHostAllocatorIsLeftAlone) {
  EXPECT_THAT(InstallTorchHostAllocator({}, DeviceBackend()),
              StatusIs(absl::StatusCode::kFailedPrecondition, ::testing::HasSubstr("2.99.1")));
}

}  // namespace
}  // namespace pinion::testing
