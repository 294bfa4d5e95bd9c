// Checks events on other threads, and in callbacks, during the submission of a copy.

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/device.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/tests/hooks/activations/offload_fixture.h"
#include "pinion/tests/hooks/activations/offload_world.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/hooks/support/test_net.h"
#include "pinion/tests/support/forwarding_device.h"

namespace pinion::testing {
namespace {

// Runs `act` just before the number-th copy is submitted.
class ActingDevice : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;

  absl::Status CopyAsync(CopyDirection direction, absl::Span<const CopyPiece> pieces,
                         StreamHandle stream) override {
    if (direction == direction_ && --copies_ == 0) std::exchange(act_, nullptr)();
    return ForwardingDevice::CopyAsync(direction, pieces, stream);
  }

  void ActAtCopy(CopyDirection direction, int number, std::function<void()> act) {
    direction_ = direction;
    copies_ = number;
    act_ = std::move(act);
  }

 private:
  CopyDirection direction_ = CopyDirection::kHostToDevice;
  int copies_ = 0;
  std::function<void()> act_;
};

class OffloadMeanwhile : public ::testing::Test {
 protected:
  std::shared_ptr<OffloadSession> NewSession(const OffloadOptions& options) {
    device_ = std::make_shared<ActingDevice>(world_.machine().device(0));
    const std::shared_ptr<Device> device = device_;
    return OffloadSession::Create(options, OwnBackend([device](int) { return device; })).value();
  }

  OffloadWorld world_{SmallWindows()};
  std::shared_ptr<ActingDevice> device_;
};

TEST_F(OffloadMeanwhile, ASourceIsFreedAfterTheCopyThatWasSubmittedMeanwhile) {
  const auto session = NewSession(SmallWindows(256 * kKiB));
  at::Tensor first;
  at::Tensor second;
  {
    const OffloadScope scope(session);
    first = Probe(world_.carrier, {world_.activation(40)}, OffloadWorld::Use);  // waits for a batch
    ASSERT_EQ(session->GetEngineStats(0).d2h.submitted_transfers, 0u);
    device_->ActAtCopy(CopyDirection::kDeviceToHost, 1, [&first] { first.reset(); });
    second = Probe(world_.carrier, {world_.activation(64)}, OffloadWorld::Use);
  }
  ASSERT_FALSE(first.defined());
  // The race detector ends the process if these overwrite bytes that the copy still reads.
  for (int i = 0; i < 8; ++i) world_.activation(40, i);
  EXPECT_EQ(session->GetStats().live_handles, 1u);
  second.backward();
}

// Most critical: between the choice of tensors to offload and their submission.
TEST_F(OffloadMeanwhile, ATensorMayGoDuringEachCallToTheDevice) {
  int number = 0;
  for (bool gone = true; gone;) {
    SCOPED_TRACE(++number);
    const auto session = NewSession(SmallWindows(256 * kKiB));
    at::Tensor first;
    const at::Tensor second = InScope(session, world_.carrier, [&](at::Tensor& second) {
      first =
          Probe(world_.carrier, {world_.activation(40)}, OffloadWorld::Use);  // waits for a batch
      device_->FailCalls([&first, left = number](const std::string&, uint64_t) mutable {
        if (--left == 0) first.reset();
        return absl::OkStatus();
      });
      second = Probe(second, {world_.activation(64)}, OffloadWorld::Use);
      // Offloaded in one batch with the second tensor.
      Probe(world_.carrier, {world_.activation(64)}, OffloadWorld::Use);
    });
    device_->FailCalls([](const std::string&, uint64_t) { return absl::OkStatus(); });
    gone = !first.defined();
    EXPECT_EQ(session->GetStats().packed, 3u);
    second.backward();
  }
  EXPECT_GE(number, 8) << "calls to the device";
}

TEST_F(OffloadMeanwhile, ATensorThatGoesWhileItsGroupIsCopiedIsNoPartOfTheGroup) {
  constexpr int kTensors = 8;
  const auto session = NewSession(SmallWindows(128 * kKiB));
  std::vector<at::Tensor> seen;
  std::vector<at::Tensor> nodes;
  {
    const OffloadScope scope(session);
    for (int i = 0; i < kTensors; ++i) {
      nodes.push_back(Observe(world_.carrier, {world_.activation(2, i)}, &seen));
    }
    device_->ActAtCopy(CopyDirection::kDeviceToHost, 1, [&nodes] { nodes[3].reset(); });
  }
  ASSERT_FALSE(nodes[3].defined());
  ASSERT_EQ(session->GetStats().grouped, static_cast<uint64_t>(kTensors));
  session->FreeDeviceMemory(0);
  EXPECT_EQ(session->GetStats().evicted_bytes, (kTensors - 1) * 2 * kKiB);
  nodes[7].backward();
  EXPECT_TRUE(SameBytes(seen[0], ActivationValues(KiB(2), 7)));
}

// No call to the device may hold a lock that another thread's scope needs.
TEST_F(OffloadMeanwhile, AnotherThreadMayEndAScopeDuringEachCallToTheDevice) {
  const auto session = NewSession(SmallWindows(64 * kKiB));
  std::atomic<int> calls = 0;
  std::atomic<int> late = 0;
  std::atomic<int> running = 0;
  device_->FailCalls([&](const std::string&, uint64_t) {
    ++calls;
    ++running;
    const auto ended = std::make_shared<std::latch>(1);
    std::thread([&running, session, ended] {
      { const OffloadScope scope(session); }
      ended->count_down();
      --running;
    }).detach();
    if (!Soon([&] { return ended->try_wait(); })) ++late;
    return absl::OkStatus();
  });
  at::Tensor y = world_.carrier;
  at::Tensor dropped = InScope(session, [&] {
    for (int i = 0; i < 4; ++i) y = Probe(y, {world_.activation(32)}, OffloadWorld::Use);
    return Probe(world_.carrier, {world_.activation(32)}, OffloadWorld::Use);
  });
  dropped.reset();
  y.backward();
  y.reset();
  EXPECT_TRUE(Soon([&] { return session->GetStats().live_handles == 0; }));
  EXPECT_TRUE(Soon([&] { return running.load() == 0; }));
  device_->FailCalls([](const std::string&, uint64_t) { return absl::OkStatus(); });
  EXPECT_GT(calls.load(), 10);
  EXPECT_EQ(late.load(), 0);
}

TEST_F(OffloadMeanwhile, APrefetchThatNobodyWillReadIsDroppedWhenItWasSubmitted) {
  const auto session = NewSession(Windows(1, 64 * kKiB));
  at::Tensor doomed;
  at::Tensor y;
  {
    const OffloadScope scope(session);
    y = world_.carrier;
    for (int i = 0; i < 3; ++i) y = Probe(y, {world_.activation(64)}, OffloadWorld::Use);
    doomed = Probe(world_.carrier, {world_.activation(64)}, OffloadWorld::Use);
    y = Probe(y, {world_.activation(64)}, OffloadWorld::Use);
  }
  device_->ActAtCopy(CopyDirection::kHostToDevice, 2, [&doomed] { doomed.reset(); });
  y.backward();
  ASSERT_FALSE(doomed.defined());
  ASSERT_TRUE(Soon([&] { return session->GetStats().live_handles == 0; }));
  EXPECT_EQ(session->GetStats().prefetches_dropped, 1u);
  EXPECT_GE(session->GetStats().prefetch_hits, 2u) << "its place in the window is free again";
}

// The second reader is another thread, during the H2D copy of the tensor that both read.
TEST_F(OffloadMeanwhile, WhatIsBeingFetchedIsNotFetchedByAnotherReaderToo) {
  for (const bool prefetched : {false, true}) {
    SCOPED_TRACE(prefetched ? "prefetched" : "fetched on demand");
    const auto session = NewSession(prefetched ? Windows(1, 64 * kKiB) : SmallWindows(1));
    UnpackSaved unpack;
    std::vector<at::Tensor> seen;
    std::thread reader;
    const at::Tensor y = InScope(session, world_.carrier, [&](at::Tensor& y) {
      const at::Tensor read_twice = world_.activation(64, 1);
      y = Probe(y, {read_twice}, [&](const at::Tensor& grad, const UnpackSaved& in_backward) {
        // The end of backward frees prefetches, read or unread.
        if (reader.joinable()) reader.join();
        unpack = in_backward;
        return grad;
      });
      y = Probe(y, {prefetched ? world_.activation(64, 2) : read_twice}, OffloadWorld::Use);
    });
    y.backward({}, /*retain_graph=*/true);
    const uint64_t before = session->GetEngineStats(0).h2d.submitted_transfers;
    // Before a prefetch, a copy fetches the tensor that backward reads first.
    const int copies = prefetched ? 2 : 1;
    device_->ActAtCopy(CopyDirection::kHostToDevice, copies, [&] {
      reader = std::thread([&] { seen = unpack(); });
      absl::SleepFor(absl::Milliseconds(50));  // gives the other thread time
    });
    y.backward({}, /*retain_graph=*/true);
    ASSERT_EQ(seen.size(), 1u);
    EXPECT_TRUE(SameBytes(seen[0], ActivationValues(KiB(64), 1)));
    EXPECT_EQ(session->GetEngineStats(0).h2d.submitted_transfers, before + copies);
  }
}

TEST_F(OffloadMeanwhile, WhatIsBeingPrefetchedIsNotPrefetchedByAnotherThreadToo) {
  const auto session = NewSession(Windows(1, kMiB));
  const at::Tensor held = world_.activation(64, 2);
  std::thread reader;
  const at::Tensor y = InScope(session, world_.carrier, [&](at::Tensor& y) {
    y = Probe(y, {world_.activation(64, 1)}, OffloadWorld::Use);
    y = Probe(y, {held}, [&](const at::Tensor& grad, const UnpackSaved& unpack) {
      device_->ActAtCopy(CopyDirection::kHostToDevice, 1, [&] {
        reader = std::thread([&] { unpack(); });
        absl::SleepFor(absl::Milliseconds(50));  // gives the other thread time
      });
      unpack();
      reader.join();
      return grad;
    });
  });
  y.backward();
  EXPECT_EQ(session->GetStats().reused_on_device, 2u) << "the test's premise";
  EXPECT_EQ(session->GetEngineStats(0).h2d.submitted_transfers, 1u);
}

}  // namespace
}  // namespace pinion::testing
