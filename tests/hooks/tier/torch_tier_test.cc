// Devices whose memory is the host's, as those of GB10 and Jetson: what leaves frees nothing.

#include "pinion/hooks/tier/torch_tier.h"

#include <torch/nn/modules/linear.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/hooks/weights/weight_offloader.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/test_net.h"
#include "pinion/tests/support/captured_log.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace torch_tier_test {

using ::testing::HasSubstr;

EmulatedOptions OneMemory() {
  EmulatedOptions machine = MachineOptions();
  machine.preset.link.kind = LinkKind::kNone;
  return machine;
}

class OneMemoryTest : public ::testing::Test {
 protected:
  EmuWorld world_{OneMemory()};
};

TEST_F(OneMemoryTest, ASessionCopiesNothingAndSaysSoOnce) {
  const CapturedLog log;
  const TestNet net(world_.device(), at::kFloat);
  for (int step = 0; step < 2; ++step) TrainStep(net, world_.session());
  const OffloadStats stats = world_.QuietStats();
  EXPECT_EQ(stats.offloaded, 0u);
  EXPECT_GT(stats.kept_copy_failed, 0u);
  const std::string text = log.text(), told = "the memory of emu:0 is the host's";
  EXPECT_THAT(text, HasSubstr(told));
  EXPECT_EQ(text.find(told), text.rfind(told)) << "once";
  EXPECT_THAT(world_.session()->Reserve(0, 1 << 20), IsOk());
  EXPECT_EQ(world_.session()->GetAllocatorStats().locked_bytes.peak, 0u);
}

TEST_F(OneMemoryTest, WeightsAreNotStreamed) {
  torch::nn::Linear module(8, 8);
  EXPECT_THAT(
      WeightOffloader::Attach(*module, world_.device(), world_.backend(), {.tier = SmallTier()}),
      StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("the host's")));
  EXPECT_TRUE(module->weight.device().is_cpu());
}

}  // namespace torch_tier_test
}  // namespace pinion::testing
