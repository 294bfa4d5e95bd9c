// Autograd starts its worker threads once in a process; devices may come later.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>

#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/emulated/emu_device.h"

namespace pinion {
namespace {

float GradientOn(const std::string& device) {
  const at::Tensor leaf = at::ones({8}, at::TensorOptions().device(c10::Device(device)));
  leaf.requires_grad_(true);
  (leaf * 3).sum().backward();
  return leaf.grad().sum().item<float>();
}

void Register(int device_count) {
  EmulatedOptions options;
  options.device_count = device_count;
  ASSERT_TRUE(RegisterEmuDevice(EmulatedMachine::Create(options).value()).ok());
}

TEST(EmuWorkers, ABackwardOnTheCpuMayComeFirst) {
  EXPECT_EQ(GradientOn("cpu"), 24);
  Register(1);
  EXPECT_EQ(GradientOn("emu:0"), 24);
}

TEST(EmuWorkers, ALaterMachineMayHaveMoreDevices) {
  Register(1);
  EXPECT_EQ(GradientOn("emu:0"), 24);
  Register(3);
  EXPECT_EQ(GradientOn("emu:2"), 24);
  EXPECT_EQ(GradientOn("emu:0"), 24);
}

}  // namespace
}  // namespace pinion
