// Checks devices that appear after autograd has started its workers, once per process.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <latch>
#include <string>
#include <thread>

#include "absl/time/clock.h"
#include "absl/time/time.h"
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

// LibTorch does the same for workers that it has started itself.
TEST(EmuWorkersDeathTest, AProcessThatExitsLetsAWorkerThatCameLaterEndAndWaitsNoLonger) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto exit_while_a_worker_runs = [] {
    // More seconds than the test may take: it fails if LibTorch waits until it gives up.
    setenv("TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT", "100000", /*overwrite=*/1);
    GradientOn("cpu");
    Register(1);
    static std::latch runs(1);
    const at::Tensor leaf = at::ones({8}, at::TensorOptions().device(c10::Device("emu:0")));
    const at::Tensor y = leaf.requires_grad_(true) * 3;
    y.register_hook([](const at::Tensor&) {
      runs.count_down();
      absl::SleepFor(absl::Milliseconds(200));
      std::fputs("the worker is done\n", stderr);
    });
    std::thread([y] { y.sum().backward(); }).detach();
    runs.wait();
    std::exit(0);
  };
  EXPECT_EXIT(exit_while_a_worker_runs(), ::testing::ExitedWithCode(0), "the worker is done");
}

}  // namespace
}  // namespace pinion
