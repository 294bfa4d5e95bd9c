// Checks the options of a session, and how a session is disabled.

#include "pinion/hooks/activations/offload_options.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/device/device.h"
#include "pinion/device/device_backend.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/device/emulated/emulated_backend.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/device/emulated/faults.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/stats/engine_stats.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/emulated/emu_device.h"
#include "pinion/tests/hooks/activations/offload_fixture.h"
#include "pinion/tests/hooks/activations/offload_world.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/error_of.h"
#include "pinion/tests/hooks/support/test_net.h"
#include "pinion/tests/support/captured_log.h"
#include "pinion/tests/support/fake_host.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(OffloadOptionsTest, AWindowOfZeroIsRefusedByName) {
  OffloadOptions options;
  options.eviction_window_bytes = 0;
  EXPECT_THAT(options.Validate(), StatusIs(absl::StatusCode::kInvalidArgument,
                                           HasSubstr("eviction_window_bytes is 0")));
  options = OffloadOptions();
  options.prefetch_window_bytes = 0;
  EXPECT_THAT(options.Validate(), StatusIs(absl::StatusCode::kInvalidArgument,
                                           HasSubstr("prefetch_window_bytes is 0")));
  EXPECT_THAT(OffloadSession::Create(options, DeviceBackend()),
              StatusIs(absl::StatusCode::kInvalidArgument));
}

TEST(OffloadOptionsTest, ADeviceTypeThatLibTorchDoesNotKnowIsRefusedByName) {
  EXPECT_THAT(OffloadSession::Create({}, DeviceBackend{"abacus", nullptr}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("\"abacus\"")));
}

TEST(OffloadOptionsTest, ADisabledSessionDoesNothing) {
  OffloadOptions options = SmallWindows();
  options.enabled = false;
  EmuWorld world(MachineOptions(), options);
  const TestNet net(world.device(), at::kFloat);
  ExpectSameGradients(TrainStep(net, nullptr), TrainStep(net, world.session()));
  EXPECT_EQ(world.session()->GetStats().packed, 0u);
}

// Returns a session that is made while the environment has the variable.
std::shared_ptr<OffloadSession> NewSessionWith(EmuWorld& world, const char* variable,
                                               const char* value) {
  EXPECT_EQ(setenv(variable, value, 1), 0);
  const std::shared_ptr<OffloadSession> session = world.NewSession(SmallWindows());
  EXPECT_EQ(unsetenv(variable), 0);
  return session;
}

TEST(OffloadOptionsTest, TheEnvironmentVariableDisablesEverySession) {
  EmuWorld world;
  const auto session = NewSessionWith(world, "PINION_DISABLE", "1");
  EXPECT_FALSE(session->options().enabled);
  TrainStep(TestNet(world.device(), at::kFloat), session);
  EXPECT_EQ(session->GetStats().packed, 0u);
}

TEST(OffloadOptionsTest, TensorsGoToTheAllocatorThatTheProgramHandsInAndSessionsMayShareIt) {
  const std::shared_ptr<EmulatedMachine> machine =
      EmulatedMachine::Create(MachineOptions()).value();
  ASSERT_THAT(RegisterEmuDevice(machine), IsOk());
  AllocatorOptions unused;  // not used by the sessions; it could not be served
  unused.max_locked_bytes = 1;
  OffloadOptions options = SmallWindows();
  const std::shared_ptr<PinnedAllocator> allocator =
      PinnedAllocator::Create(options.allocator, machine->device(0)->pinned_source(),
                              FakeHost().Probe())
          .value();
  options.allocator = unused;
  const TestNet net(c10::Device("emu:0"), at::kFloat);
  for (uint64_t session_number = 1; session_number <= 2; ++session_number) {
    const uint64_t before = allocator->GetStats().allocations;
    const std::shared_ptr<OffloadSession> session =
        OffloadSession::Create(options, EmulatedBackend(machine), allocator).value();
    ExpectSameGradients(TrainStep(net, nullptr), TrainStep(net, session));
    ASSERT_GT(session->GetStats().offloaded, 0u);
    ASSERT_GT(session->GetStats().fetched_bytes, 0u);
    EXPECT_GT(allocator->GetStats().allocations, before);
    EXPECT_EQ(session->GetAllocatorStats().allocations, allocator->GetStats().allocations);
  }
}

// --- What cannot work is refused where it is given ---

DeviceBackend WithoutDevices() {
  return {"cuda", [](int) { return absl::NotFoundError("no CUDA device: install a driver"); }};
}

TEST(OffloadSessionCreate, WithoutADeviceIsRefused) {
  EXPECT_THAT(OffloadSession::Create({}, WithoutDevices()),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("no CUDA device")));
}

TEST(OffloadSessionCreate, ADisabledSessionNeedsNoDevice) {
  OffloadOptions options;
  options.enabled = false;
  EXPECT_THAT(OffloadSession::Create(options, WithoutDevices()), IsOk());
}

TEST(OffloadSessionCreate, WhatTheAllocatorCannotDoIsRefusedWithoutADevice) {
  OffloadOptions options;
  options.enabled = false;
  options.allocator.high_percent = 120;
  EXPECT_THAT(OffloadSession::Create(options, WithoutDevices()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("high_percent")));
}

TEST(OffloadSessionCreate, AnAlignmentThatTheDeviceCannotServeIsRefusedByName) {
  EmuWorld world;
  OffloadOptions options = SmallWindows();
  options.allocator.alignment_bytes = 4 * kMiB;
  EXPECT_THAT(
      OffloadSession::Create(options, world.backend()),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("alignment_bytes is 4194304")));
}

TEST(OffloadSessionCreate, OneThatIsNotEnabledReservesNothing) {
  EmuWorld world;
  OffloadOptions options = SmallWindows();
  options.enabled = false;
  const auto session = OffloadSession::Create(options, world.backend()).value();
  EXPECT_THAT(session->Reserve(0, kMiB), IsOk());
  EXPECT_EQ(session->Trim(0).value(), 0u);
  EXPECT_EQ(session->GetAllocatorStats().locked_bytes.current, 0u);
}

// A graph that waits for its backward uses the pool too, so both sessions share one budget.
TEST(OffloadSessionCreate, AGraphThatOutlivesItsSessionSharesItsPoolWithTheNext) {
  EmuWorld world;
  OffloadOptions options = SmallWindows();
  options.allocator.segment_bytes = 4 * kMiB;
  world.DropSession();
  auto session = world.NewSession(options);
  const at::Tensor x =
      at::rand({kMiB / 4}, at::TensorOptions().device(world.device())).requires_grad_();
  const at::Tensor loss = InScope(session, [&] { return x.mul(2).sin().sum(); });
  EXPECT_EQ(session->GetStats().offloaded, 1u);
  session = nullptr;
  const auto next = world.NewSession(options);
  EXPECT_EQ(next->GetAllocatorStats().requested_bytes.current, kMiB);
  options.allocator.segment_bytes = 8 * kMiB;
  EXPECT_THAT(OffloadSession::Create(options, world.backend()),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("segment_bytes")));
  loss.backward();
}

// torchtune moved CPU tensors to the device (torchtune#2456).
// The backend was forgotten, where a program moved from one accelerator to another.
TEST(OffloadSessionScope, ATensorOnAnotherAcceleratorRaisesAndACpuTensorDoesNot) {
  EmuWorld world;
  const DeviceBackend emulated = EmulatedBackend(world.machine().shared_from_this());
  // While the session is created, LibTorch seems to have a second accelerator.
  const c10::impl::FakeGuardImpl<c10::kXPU> guard;
  c10::impl::registerDeviceGuard(c10::kXPU, &guard);
  c10::SetAllocator(c10::kXPU, c10::GetCPUAllocator());
  const auto session = OffloadSession::Create(SmallWindows(), {"xpu", emulated.device}).value();
  c10::impl::registerDeviceGuard(c10::kXPU, nullptr);
  TrainStep(TestNet(at::kCPU, at::kFloat), session);
  EXPECT_GT(session->GetStats().kept_unsupported, 0u);
  const TestNet net(world.device(), at::kFloat);
  EXPECT_THAT(ErrorOf([&] { TrainStep(net, session); }),
              AllOf(HasSubstr("made for \"xpu\""), HasSubstr("emu:0")));
}

TEST(OffloadSessionScope, ADeviceThatCanNeverBeSetUpRaises) {
  EmuWorld world;
  const DeviceBackend emulated = EmulatedBackend(world.machine().shared_from_this());
  for (const absl::Status& never : {absl::NotFoundError("none of that number"),
                                    absl::InvalidArgumentError("none of that number")}) {
    absl::Status opens;
    const auto open = [&](int index) -> absl::StatusOr<std::shared_ptr<Device>> {
      if (!opens.ok()) return opens;
      return emulated.device(index);
    };
    const auto session = OffloadSession::Create(SmallWindows(), OwnBackend(open)).value();
    opens = never;
    const TestNet net(world.device(), at::kFloat);
    EXPECT_THAT(ErrorOf([&] { TrainStep(net, session); }),
                AllOf(HasSubstr("setting up offload"), HasSubstr("of that number")))
        << never;
  }
}

TEST(OffloadSessionCreate, ASwitchThatIsOnIsNamedInTheLog) {
  EmuWorld world;
  for (const char* name : {"PINION_DISABLE", "PINION_VERIFY"}) {
    const CapturedLog log;
    NewSessionWith(world, name, "1");
    EXPECT_THAT(log.text(), HasSubstr(std::string(name) + "=1"));
  }
  const CapturedLog log;
  world.NewSession(SmallWindows());
  EXPECT_EQ(log.text(), "");
}

TEST(OffloadSessionCreate, AWordSwitchesOnAndOffAsANumberDoes) {
  EmuWorld world;
  const auto enabled = [&](const char* value) {
    return NewSessionWith(world, "PINION_DISABLE", value)->options().enabled;
  };
  for (const char* on : {"1", "true", "TRUE", "yes"}) EXPECT_FALSE(enabled(on)) << on;
  const CapturedLog log;
  for (const char* off : {"0", "false", "no", ""}) EXPECT_TRUE(enabled(off)) << off;
  EXPECT_EQ(log.text(), "");
}

TEST(OffloadSessionCreate, ASwitchThatIsNeitherOnNorOffIsNamedInTheLog) {
  EmuWorld world;
  for (const char* name : {"PINION_DISABLE", "PINION_VERIFY"}) {
    const CapturedLog log;
    const auto session = NewSessionWith(world, name, "maybe");
    EXPECT_TRUE(session->options().enabled);
    EXPECT_FALSE(session->options().verify);
    EXPECT_THAT(log.text(), HasSubstr(std::string(name) + "=maybe switches nothing on"));
  }
}

// A scope in the forward of a checkpointed block is reopened when backward recomputes the block.
TEST(OffloadSessionScope, AScopeInsideABackwardSaysThatNothingLeaves) {
  EmuWorld world;
  const CapturedLog log;
  const at::Tensor x = at::ones({64}, at::TensorOptions().device(world.device())).requires_grad_();
  const at::Tensor y = x.mul(2);
  y.register_hook([&](const at::Tensor&) { const OffloadScope scope(world.session()); });
  { const OffloadScope scope(world.session()); }
  EXPECT_EQ(log.text(), "");
  y.sum().backward();
  EXPECT_THAT(log.text(), HasSubstr("kept_in_backward"));
}

// --- The link ---

OffloadOptions WithoutLink() {
  OffloadOptions options = SmallWindows();
  options.link.reset();
  return options;
}

TEST(OffloadOptionsLink, EachDeviceIsMeasuredWhenItIsFirstUsed) {
  EmuWorld world(MachineOptions(), WithoutLink());
  const TestNet net(world.device(), at::kFloat);
  const Gradients plain = TrainStep(net, nullptr);
  EXPECT_FALSE(world.session()->GetLink(0).has_value());
  ExpectSameGradients(plain, TrainStep(net, world.session()));
  const std::optional<LinkCalibration> link = world.session()->GetLink(0);
  ASSERT_TRUE(link.has_value());
  EXPECT_EQ(link->modelled, !world.device().is_cuda());
  const LinkModel& model = world.machine().options().preset.link;
  EXPECT_NEAR(link->h2d.gb_per_s, model.h2d_gb_per_s, 0.05 * model.h2d_gb_per_s);
  EXPECT_NEAR(link->d2h.piece_us, model.piece_us, 0.2 * model.piece_us);
}

// For example a calibration from an earlier run.
TEST(OffloadOptionsLink, AGivenLinkIsNotMeasured) {
  const auto copies = [](const OffloadOptions& options) {
    EmuWorld world(MachineOptions(), options);
    const TestNet net(world.device(), at::kFloat);
    TrainStep(net, world.session());
    EXPECT_TRUE(world.session()->GetLink(0).has_value());
    const EngineStats engine = world.session()->GetEngineStats(0);
    return world.machine().calls(DeviceCall::kCopy) - engine.d2h.submitted_transfers -
           engine.h2d.submitted_transfers;
  };
  EXPECT_LT(copies(SmallWindows()), copies(WithoutLink()));
}

TEST(OffloadOptionsLink, WithoutOverlapNothingIsPlannedAndSoNothingMeasured) {
  OffloadOptions options = WithoutLink();
  options.overlap = false;
  EmuWorld world(MachineOptions(), options);
  const TestNet net(world.device(), at::kFloat);
  TrainStep(net, world.session());
  EXPECT_GT(world.session()->GetStats().offloaded, 0u);
  EXPECT_FALSE(world.session()->GetLink(0)->modelled);
  EXPECT_EQ(world.session()->GetLink(0)->h2d.gb_per_s, AssumedLink().h2d.gb_per_s);
}

TEST(OffloadOptionsLink, ALinkThatIsGivenIsTakenWithoutOverlapAsWell) {
  OffloadOptions options = SmallWindows();
  options.overlap = false;
  options.link->h2d.gb_per_s = 123;
  EmuWorld world(MachineOptions(), options);
  TrainStep(TestNet(world.device(), at::kFloat), world.session());
  EXPECT_EQ(world.session()->GetLink(0)->h2d.gb_per_s, 123);
}

TEST(OffloadOptionsLink, ADeviceThatCannotBeMeasuredIsTakenForPcie4) {
  OffloadWorld world(WithoutLink());
  const TestNet net(world.device(), at::kFloat);
  const Gradients plain = TrainStep(net, nullptr);
  world.LeaveRoom(512 * kKiB);
  ExpectSameGradients(plain, TrainStep(net, world.session()));
  EXPECT_EQ(world.session()->GetLink(0)->h2d.gb_per_s, AssumedLink().h2d.gb_per_s);
  EXPECT_GT(world.session()->GetStats().offloaded, 0u);
}

TEST(OffloadOptionsLink, TheOneThatIsAssumedIsTheHeaders) {
  const LinkCalibration link = AssumedLink();
  for (const LinkCurve& curve : {link.h2d, link.d2h}) {
    EXPECT_EQ(curve.gb_per_s, 20);
    EXPECT_EQ(curve.fixed_us, 3);
    EXPECT_EQ(curve.piece_us, 1);
  }
  EXPECT_EQ(link.h2d_duplex_gb_per_s, 15);
  EXPECT_EQ(link.d2h_duplex_gb_per_s, 15);
}

TEST(OffloadOptionsLink, OneWithoutBandwidthIsRefused) {
  OffloadOptions options;
  options.link = LinkCalibration();
  EXPECT_THAT(options.Validate(), StatusIs(absl::StatusCode::kInvalidArgument,
                                           AllOf(HasSubstr("the link's h2d.gb_per_s is 0"),
                                                 HasSubstr("leave OffloadOptions::link empty"))));
}

TEST(OffloadOptionsLink, ACostThatIsNegativeIsRefusedInEitherDirection) {
  for (LinkCurve LinkCalibration::*direction : {&LinkCalibration::h2d, &LinkCalibration::d2h}) {
    for (double LinkCurve::*cost : {&LinkCurve::fixed_us, &LinkCurve::piece_us}) {
      OffloadOptions options;
      options.link = AssumedLink();
      (*options.link.*direction).*cost = 0;
      EXPECT_THAT(options.Validate(), IsOk());
      (*options.link.*direction).*cost = -1;
      EXPECT_THAT(options.Validate(),
                  StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("is -1")));
    }
  }
}

}  // namespace
}  // namespace pinion::testing
