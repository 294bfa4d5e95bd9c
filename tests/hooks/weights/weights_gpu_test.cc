// Compares weights streamed to a GPU, or to the emulated device without one, with a resident model.
// The host receives the device's bits. A step of the host's optimizer is as near to the device's as
// docs/users/weights.md says; on the emulated device both have the same arithmetic and bits.

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/optim/adamw.h>

#include <cstdint>
#include <cstdlib>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/device/cuda/cuda_backend.h"
#include "pinion/hooks/weights/weight_offloader.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/test_net.h"
#include "pinion/tests/hooks/weights/streamed_net.h"

namespace pinion::testing {
namespace {

using at::Tensor;

constexpr int kLayers = 6;

// LibTorch's autograd knows one accelerator of a process: the emulated one and CUDA do not go
// together.
class WeightsOnTest : public ::testing::Test {
 protected:
  void SetUp() override {
    setenv("PINION_TEST_DEVICE", CudaDeviceCount().ok() ? "cuda:0" : "emu", /*overwrite=*/0);
  }
};

std::vector<Tensor> OnHost(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> on_host;
  for (const Tensor& tensor : tensors) on_host.push_back(tensor.detach().cpu().clone());
  return on_host;
}

std::vector<Tensor> Gradients(const std::vector<Tensor>& parameters) {
  std::vector<Tensor> gradients;
  for (const Tensor& parameter : parameters) gradients.push_back(parameter.grad().cpu());
  return gradients;
}

TEST_F(WeightsOnTest, GradientsAreTheDevicesOwnAndAStepIsWithinTheDocumentedTolerance) {
  EmuWorld world(MachineOptions(), SmallWindows());
  const Tensor x = Input().to(world.device());
  const torch::optim::AdamWOptions adamw(0.01);

  Net resident(kLayers);
  resident->to(world.device());
  torch::optim::AdamW on_device(resident->parameters(), adamw);
  Net streamed(kLayers);
  auto weights =
      WeightOffloader::Attach(*streamed, world.device(), world.backend(), {.tier = SmallTier()});
  ASSERT_TRUE(weights.ok()) << weights.status();
  torch::optim::AdamW on_host((*weights)->host_parameters(), adamw);

  for (int step = 0; step < 4; ++step) {
    SCOPED_TRACE(step);
    const Tensor resident_loss = resident->forward(x + step).pow(2).mean();
    resident_loss.backward();
    const Tensor streamed_loss = streamed->forward(x + step).pow(2).mean();
    streamed_loss.backward();
    (*weights)->WaitForGradients();
    EXPECT_TRUE(SameBytes(resident_loss.detach().cpu(), streamed_loss.detach().cpu()));
    const std::vector<Tensor> expected = Gradients(resident->parameters());
    const std::vector<Tensor> arrived = Gradients((*weights)->host_parameters());
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(SameBytes(expected[i], arrived[i])) << "gradient " << i;
    }
    on_device.step();
    on_device.zero_grad();
    (*weights)->Step([&] { on_host.step(); });
    on_host.zero_grad();
    const std::vector<Tensor> theirs = OnHost(resident->parameters());
    const std::vector<Tensor> ours = OnHost((*weights)->host_parameters());
    for (size_t i = 0; i < theirs.size(); ++i) {
      EXPECT_TRUE(AsOnCpu(theirs[i], ours[i])) << "parameter " << i;
    }
    // The next step's gradients can be compared bit for bit only from the same weights.
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < ours.size(); ++i) resident->parameters()[i].copy_(ours[i]);
  }
  const WeightStats stats = (*weights)->GetStats();
  EXPECT_GE(stats.drops, uint64_t{4} * kLayers) << "the window is smaller than the model";
  EXPECT_GE(stats.gradient_bytes, uint64_t{4} * kLayers * kLayerBytes);
}

}  // namespace
}  // namespace pinion::testing
