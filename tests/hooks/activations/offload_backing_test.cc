// Checks saved tensors in a backing beyond pinned memory, and in a backing that fails.

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "pinion/engine/tier/backing.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/tests/engine/tier/failing_backing.h"
#include "pinion/tests/engine/tier/slow_backing.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/test_net.h"

namespace pinion::testing {
namespace {

class OffloadBackingTest : public ::testing::Test {
 protected:
  std::shared_ptr<OffloadSession> NewSession(std::shared_ptr<Backing> backing) {
    OffloadOptions options = SmallWindows();
    options.backing = std::move(backing);
    return world_.NewSession(options);
  }

  at::Tensor Forward(const std::shared_ptr<OffloadSession>& session) {
    SeedGenerators();
    const OffloadScope scope(session);
    return net_.Loss();
  }

  EmuWorld world_;
  const TestNet net_{world_.device(), at::kFloat};
  const Gradients plain_ = TrainStep(net_, nullptr);
};

TEST_F(OffloadBackingTest, WhatABackingCarriesFurtherComesBackAsItWas) {
  const auto backing = std::make_shared<SlowBacking>(world_.machine());
  const std::shared_ptr<OffloadSession> session = NewSession(backing);
  const at::Tensor loss = Forward(session);
  backing->Drain();
  EXPECT_EQ(session->GetAllocatorStats().used_bytes.current, 0u) << "all of it has gone on";
  loss.backward();
  ExpectSameGradients(plain_, TakeGradients(net_, loss));
  EXPECT_GT(session->GetStats().evicted_bytes, 0u);
  EXPECT_GT(session->GetStats().fetched_bytes, 0u);
  EXPECT_GT(backing->waits(), 0u) << "copies wait until their bytes have been read";
}

TEST_F(OffloadBackingTest, WhatABackingHasNoRoomForStaysOnTheDevice) {
  const auto backing = std::make_shared<FailingBacking>();
  backing->reserve = absl::ResourceExhaustedError("the file system is full");
  const std::shared_ptr<OffloadSession> session = NewSession(backing);
  const at::Tensor loss = Forward(session);
  EXPECT_GT(session->GetStats().kept_no_host_memory, 0u);
  EXPECT_EQ(session->GetStats().offloaded, 0u);
  loss.backward();
  ExpectSameGradients(plain_, TakeGradients(net_, loss));
}

TEST_F(OffloadBackingTest, ABackwardThatCannotReadItsBackingThrowsAndMayBeRepeated) {
  const auto backing = std::make_shared<FailingBacking>();
  const std::shared_ptr<OffloadSession> session = NewSession(backing);
  const at::Tensor loss = Forward(session);
  backing->to_read = absl::DataLossError("the file is too short");
  EXPECT_THROW(loss.backward(/*gradient=*/{}, /*retain_graph=*/true), c10::Error);
  TakeGradients(net_, loss);  // removes partial gradients
  EXPECT_GT(session->GetStats().evicted_bytes, 0u);

  backing->to_read = absl::OkStatus();
  loss.backward();
  ExpectSameGradients(plain_, TakeGradients(net_, loss));
  EXPECT_GT(session->GetStats().fetched_bytes, 0u);
}

}  // namespace
}  // namespace pinion::testing
