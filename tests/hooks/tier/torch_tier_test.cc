// Checks devices that share the host's memory (GB10, Jetson), where offloading frees nothing.

#include "pinion/hooks/tier/torch_tier.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <torch/nn/modules/linear.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/device/cuda/cuda_backend.h"
#include "pinion/device/device.h"
#include "pinion/device/device_backend.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/tier/host_tier.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/hooks/attribution/attribution_session.h"
#include "pinion/hooks/attribution/layer_options.h"
#include "pinion/hooks/attribution/tap.h"
#include "pinion/hooks/weights/weight_offloader.h"
#include "pinion/tests/device/cuda/fake_cuda.h"
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

// vLLM had to disable offload where device and host share memory (vLLM#37699).
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

TEST_F(OneMemoryTest, AttributionThatKeepsResultsOnTheDeviceCopiesNothing) {
  const auto session = AttributionSession::Create(SmallTier(), world_.backend()).value();
  const at::Tensor x = at::ones({4, 4}).to(world_.device());
  const auto forward = [](const std::vector<at::Tensor>& in) {
    return Tap("layer", in[0] * 2).sum(1);
  };
  LayerOptions options;
  for (const bool keeps : {true, false}) {
    options.keep_on_device = keeps;
    const at::Tensor value =
        session->EvalLayers(forward, {"layer"}, {x}, options)[0].tensors[0].activation;
    EXPECT_EQ(value.device(), keeps ? world_.device() : c10::Device(at::kCPU));
    EXPECT_TRUE(SameBytes(value.cpu(), at::full({4, 4}, 2.0f)));
    EXPECT_EQ(world_.session()->GetAllocatorStats().allocations, keeps ? 0u : 1u);
  }
}

TEST(IntegratedCudaDeviceTest, HasNoMemoryOfItsOwnAndACoherentOneHas) {
  EmulatedOptions machine;
  machine.preset = *FindPreset("gh200_c2c");
  for (const bool is_integrated : {false, true}) {
    FakeCuda fake(machine);
    if (is_integrated) fake.SetIntegrated();
    const DeviceBackend backend = CudaBackend(FakeCuda::Api());
    const auto tier =
        HostTier::OfProcess({}, backend, backend.device(0).value()->pinned_source()).value();
    const absl::Status status = CheckHasOwnMemory(*tier->ForDevice(0).value());
    if (is_integrated) {
      EXPECT_THAT(status, StatusIs(absl::StatusCode::kUnimplemented,
                                   HasSubstr("the memory of cuda:0 is the host's")));
    } else {
      EXPECT_THAT(status, IsOk());
    }
  }
}

}  // namespace torch_tier_test
}  // namespace pinion::testing
