#include "pinion/device/device_backend.h"

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_backend.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace {

using ::pinion::testing::IsOk;
using ::pinion::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(DeviceBackendTest, WithoutAFunctionItIsRefusedByName) {
  const DeviceBackend backend = {"emu", nullptr};
  const auto refused = StatusIs(
      absl::StatusCode::kInvalidArgument,
      AllOf(HasSubstr("DeviceBackend::device of \"emu\" is not set"), HasSubstr("CudaBackend()")));
  EXPECT_THAT(backend.Validate(), refused);
  EXPECT_THAT(backend.Open(0), refused);
}

TEST(DeviceBackendTest, ADeviceThatIsNullIsRefusedByNameAndIndex) {
  const DeviceBackend backend = {
      "emu", [](int) -> absl::StatusOr<std::shared_ptr<Device>> { return nullptr; }};
  EXPECT_THAT(backend.Validate(), IsOk());
  EXPECT_THAT(backend.Open(3), StatusIs(absl::StatusCode::kInvalidArgument,
                                        AllOf(HasSubstr("\"emu\" returned null for device 3"),
                                              HasSubstr("return NotFound"))));
}

TEST(DeviceBackendTest, WhatTheFunctionReturnsIsPassedOn) {
  const DeviceBackend backend = EmulatedBackend(EmulatedMachine::Create({}).value());
  EXPECT_EQ(backend.Open(0).value()->name(), "emu:0");
  EXPECT_THAT(backend.Open(1), StatusIs(absl::StatusCode::kNotFound, HasSubstr("emu:1")));
}

}  // namespace
}  // namespace pinion
