// Checks sticky device errors: gradients are right, or the error names the first failed call. Host
// data is kept, and device memory that a copy may still access is never reused.
//
// Only the engine sees the failures, so LibTorch's own work continues. Deliberate leaks keep the
// machine from being replaced, so all tests of this file share one.

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/device.h"
#include "pinion/device/device_backend.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/tests/hooks/activations/offload_fixture.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/error_of.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/hooks/support/test_net.h"
#include "pinion/tests/support/captured_log.h"
#include "pinion/tests/support/forwarding_device.h"

namespace pinion::testing {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

// Fails permanently at the submission of a copy in one direction, after that copy has begun.
class BreakingDevice : public ForwardingDevice {
 public:
  BreakingDevice(std::shared_ptr<Device> device, CopyDirection direction)
      : ForwardingDevice(std::move(device)), direction_(direction) {}

  absl::Status CopyAsync(CopyDirection direction, absl::Span<const CopyPiece> pieces,
                         StreamHandle stream) override {
    const absl::Status copied = ForwardingDevice::CopyAsync(direction, pieces, stream);
    return direction == direction_ ? absl::InternalError("the link is gone") : copied;
  }

 private:
  const CopyDirection direction_;
};

class OffloadStickyError : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { world_ = new EmuWorld(); }

  static std::shared_ptr<OffloadSession> SessionOn(std::shared_ptr<Device> device,
                                                   uint64_t window_bytes = 6 * kKiB) {
    OffloadOptions options = SmallWindows(window_bytes);
    options.allocator.segment_bytes = 256 * kKiB;
    const DeviceBackend backend = OwnBackend([device](int) { return device; });
    return OffloadSession::Create(options, backend).value();
  }

  static std::shared_ptr<Device> device() { return world_->machine().device(0); }
  static at::Tensor NewCarrier() {
    return at::ones({1}, at::TensorOptions(world_->device())).requires_grad_(true);
  }
  // Two nodes, each with a tensor that has been evicted except for the window.
  static at::Tensor Forward(const std::shared_ptr<OffloadSession>& session,
                            const at::Tensor& carrier, std::vector<at::Tensor>* seen) {
    const OffloadScope scope(session);
    at::Tensor y = Observe(carrier, {Activation(carrier, {64, 64}, 1)}, seen);
    return Observe(y, {Activation(carrier, {64, 64}, 2)}, seen);
  }
  // Allocates all free device memory for a moment, so that a copy into it would be a race.
  static void UseFreedMemory(at::IntArrayRef sizes = {64, 64}) {
    for (int i = 0; i < 16; ++i) at::full(sizes, -1, at::TensorOptions(world_->device()));
    ASSERT_TRUE(world_->machine().SynchronizeDevice(0).ok());
  }

  static EmuWorld* world_;  // leaked: see above
};

EmuWorld* OffloadStickyError::world_ = nullptr;

TEST_F(OffloadStickyError, EveryCallOfAStepMayFailForGood) {
  NetShape shape;
  shape.layers = 1;
  shape.tokens = 8;
  const TestNet net(world_->device(), at::kFloat, shape);
  const Gradients plain = TrainStep(net, nullptr);
  uint64_t calls = 0;
  {
    const auto counting = std::make_shared<ForwardingDevice>(device());
    const auto session = SessionOn(counting);
    ExpectSameGradients(plain, TrainStep(net, session));
    calls = counting->calls();
    ASSERT_GT(session->GetStats().evicted_bytes, 0u);
    ASSERT_GT(session->GetStats().fetched_bytes, 0u);
  }
  ASSERT_GT(calls, 20u);
  int errors = 0;
  for (uint64_t at = 1; at <= calls; ++at) {
    SCOPED_TRACE("call " + std::to_string(at) + " and all later ones");
    const auto failing = std::make_shared<ForwardingDevice>(device());
    failing->FailCalls([at](const std::string& call, uint64_t number) {
      return number < at ? absl::OkStatus() : absl::InternalError("injected, sticky");
    });
    const auto session = SessionOn(failing);
    const std::string error = ErrorOf([&] {
      EXPECT_TRUE(SameGradients(plain, TrainStep(net, session)))
          << "a wrong gradient without an error";
    });
    EXPECT_THAT(error, AnyOf("no error", HasSubstr("injected, sticky")));
    errors += error != "no error";
    for (const at::Tensor& parameter : net.parameters()) parameter.mutable_grad().reset();
    EXPECT_TRUE(Soon([&] { return session->GetStats().live_handles == 0; }));
    EXPECT_EQ(session->GetAllocatorStats().booked_bytes.current, 0u);
    if (HasFailure()) return;
  }
  EXPECT_GT(errors, 0);
}

// A failed query is not reported as a capture: statistics must point to an error.
TEST_F(OffloadStickyError, ATensorWhoseStreamCannotBeAskedCountsAsAFailedCopy) {
  const auto failing = std::make_shared<ForwardingDevice>(device());
  failing->FailCalls([](const std::string& call, uint64_t) {
    return call == "IsCapturing" ? absl::UnavailableError("injected") : absl::OkStatus();
  });
  const auto session = SessionOn(failing);
  std::vector<at::Tensor> seen;
  Forward(session, NewCarrier(), &seen).backward();
  EXPECT_TRUE(SameBytes(seen[0], ActivationValues({64, 64}, 1)));
  EXPECT_EQ(session->GetStats().kept_copy_failed, 2u);
  EXPECT_EQ(session->GetStats().kept_capturing, 0u);
}

TEST_F(OffloadStickyError, BackwardNamesTheFirstCallThatFailedAndHostDataIsKept) {
  const auto breaking = std::make_shared<BreakingDevice>(device(), CopyDirection::kHostToDevice);
  const auto session = SessionOn(breaking);
  const at::Tensor carrier = NewCarrier();
  std::vector<at::Tensor> seen;
  const at::Tensor y = Forward(session, carrier, &seen);
  const uint64_t booked = session->GetAllocatorStats().booked_bytes.current;
  EXPECT_GT(booked, 0u);
  for (int attempt = 0; attempt < 2; ++attempt) {
    EXPECT_THAT(ErrorOf([&] { y.backward({}, /*retain_graph=*/true); }),
                AllOf(HasSubstr("fetching a saved tensor"),
                      HasSubstr("emu:0 failed for good at CopyAsync: the link is gone")));
    EXPECT_EQ(session->GetAllocatorStats().booked_bytes.current, booked);
  }
}

// The error came after the copy had begun. The copy may run at any time, so its source and
// destination must not be given to other tensors.
TEST_F(OffloadStickyError, MemoryUnderACopyInThatFailedForGoodIsNotUsedAgain) {
  const auto breaking = std::make_shared<BreakingDevice>(device(), CopyDirection::kHostToDevice);
  const at::Tensor carrier = NewCarrier();
  std::vector<at::Tensor> seen;
  EXPECT_THROW(Forward(SessionOn(breaking), carrier, &seen).backward(), c10::Error);
  UseFreedMemory();
}

TEST_F(OffloadStickyError, MemoryUnderACopyOutThatFailedForGoodIsNotUsedAgain) {
  const auto breaking = std::make_shared<BreakingDevice>(device(), CopyDirection::kDeviceToHost);
  const auto session = SessionOn(breaking);
  const at::Tensor carrier = NewCarrier();
  std::vector<at::Tensor> seen;
  Forward(session, carrier, &seen).backward();
  EXPECT_TRUE(SameBytes(seen[0], ActivationValues({64, 64}, 1)));
  EXPECT_EQ(session->GetStats().kept_copy_failed, 2u);
  seen.clear();
  UseFreedMemory();
}

TEST_F(OffloadStickyError, MemoryUnderACopyOutOfAGroupThatFailedForGoodIsNotUsedAgain) {
  constexpr int kTensors = 32;  // of 2 KiB, gathered
  const auto breaking = std::make_shared<BreakingDevice>(device(), CopyDirection::kDeviceToHost);
  const auto session = SessionOn(breaking, /*window_bytes=*/kMiB);
  const at::Tensor carrier = NewCarrier();
  std::vector<at::Tensor> seen;
  const at::Tensor y = InScope(session, carrier, [&](at::Tensor& y) {
    for (int i = 0; i < kTensors; ++i) y = Observe(y, {Activation(carrier, {512}, i)}, &seen);
  });
  EXPECT_EQ(session->GetStats().kept_copy_failed, static_cast<uint64_t>(kTensors));
  UseFreedMemory({128, 128});
  y.backward();
  EXPECT_TRUE(SameBytes(seen.at(0), ActivationValues({512}, 0)));
}

// Tensors, gathered or not, are released during the submission; the wait for the copy fails.
TEST_F(OffloadStickyError, MemoryUnderACopyOutThatNobodyNeedsAndNobodyCanWaitForIsNotUsedAgain) {
  for (const int tensors : {3, 32}) {
    SCOPED_TRACE(tensors);
    std::vector<at::Tensor> nodes;
    bool broken = false;
    const auto failing = std::make_shared<ForwardingDevice>(device());
    failing->FailCalls([&](const std::string& call, uint64_t) {
      if (call == "CopyAsync") {
        nodes.clear();
        broken = true;
      }
      return broken && (call == "StreamWaitEvent" || call == "WaitEvent")
                 ? absl::InternalError("the link is gone")
                 : absl::OkStatus();
    });
    const auto session = SessionOn(failing, /*window_bytes=*/kMiB);
    const at::Tensor carrier = NewCarrier();
    {
      const OffloadScope scope(session);
      for (int i = 0; i < tensors; ++i) {
        nodes.push_back(Probe(carrier, {Activation(carrier, {512}, i)},
                              [](const at::Tensor& grad, const UnpackSaved&) { return grad; }));
      }
    }
    EXPECT_TRUE(broken);
    EXPECT_EQ(session->GetStats().live_handles, 0u);
    EXPECT_EQ(session->GetStats().groups, 1u) << "the copy was submitted";
    UseFreedMemory({512});
    UseFreedMemory({128, 128});
    failing->FailCalls([](const std::string&, uint64_t) { return absl::OkStatus(); });
  }
}

TEST_F(OffloadStickyError, TheLogTellsHowMuchMemoryIsLeaked) {
  bool broken = false;
  const auto failing = std::make_shared<ForwardingDevice>(device());
  failing->FailCalls([&broken](const std::string&, uint64_t) {
    return broken ? absl::InternalError("the link is gone") : absl::OkStatus();
  });
  const auto session = SessionOn(failing, /*window_bytes=*/kMiB);
  const at::Tensor carrier = NewCarrier();
  at::Tensor y = InScope(session, [&] {
    return Probe(carrier, {Activation(carrier, {64, 64})},
                 [](const at::Tensor& grad, const UnpackSaved&) { return grad; });
  });
  const CapturedLog log;
  broken = true;
  y.reset();
  EXPECT_THAT(log.text(), HasSubstr("leaking 16384 bytes of device memory"));
}

}  // namespace
}  // namespace pinion::testing
