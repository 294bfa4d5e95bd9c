// Checks that another LibTorch release than the compiled one is rejected.

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/version.h>

#include <cstdint>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(TorchVersion, TheOneThatTheTestsRunWithIsTheOneThatTheyWereCompiledFor) {
  EXPECT_THAT(CheckTorchVersion(aoti_torch_abi_version()), IsOk());
}

TEST(TorchVersion, AnotherReleaseIsRefusedAndBothAreNamed) {
  EXPECT_THAT(CheckTorchVersion(uint64_t{2} << 56 | uint64_t{99} << 48 | uint64_t{1} << 40),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr(TORCH_VERSION), HasSubstr("2.99.1"))));
}

}  // namespace
}  // namespace pinion::testing
