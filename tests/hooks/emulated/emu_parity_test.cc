// Checks that programs on the emulated device compute the CPU's bits.

#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <c10/core/Device.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/emulated/emu_device.h"
#include "pinion/tests/hooks/emulated/parity_cases.h"
#include "pinion/tests/hooks/support/cpu_kernels.h"

namespace pinion {
namespace {

using Parameters = std::tuple<ParityCase, int, at::ScalarType>;

class EmuParityTest : public ::testing::TestWithParam<Parameters> {};

// Compares bytes, so that equal NaNs are equal.
bool SameBits(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  return at::equal(a.contiguous().view(at::kByte), b.contiguous().view(at::kByte));
}

at::Tensor OnCpu(const at::Tensor& tensor) {
  at::Tensor cpu = tensor.detach().to(at::kCPU);
  return cpu.dim() == 0 ? cpu.unsqueeze(0) : cpu;
}

TEST_P(EmuParityTest, HasTheBitsOfTheCpu) {
  testing::ChooseCpuKernels();
  const auto& [parity_case, index, type] = GetParam();
  EmulatedOptions options;
  options.device_count = 2;
  options.schedule = EffectSchedule::kRandom;
  ASSERT_TRUE(RegisterEmuDevice(EmulatedMachine::Create(options).value()).ok());
  const std::vector<at::Tensor> expected = parity_case.run(c10::Device(c10::kCPU), type);
  const c10::Device device("emu:" + std::to_string(index));
  const std::vector<at::Tensor> actual = parity_case.run(device, type);
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    const at::Tensor cpu = OnCpu(actual[i]), want = OnCpu(expected[i]);
    EXPECT_TRUE(SameBits(cpu, want))
        << "result " << i << " of shape " << want.sizes() << " differs by up to "
        << cpu.to(at::kDouble).sub(want.to(at::kDouble)).abs().max().item().toDouble();
  }
}

std::string Name(const ::testing::TestParamInfo<Parameters>& info) {
  return std::get<0>(info.param).name + "OnEmu" + std::to_string(std::get<1>(info.param)) +
         c10::toString(std::get<2>(info.param));
}

INSTANTIATE_TEST_SUITE_P(Float, EmuParityTest,
                         ::testing::Combine(::testing::ValuesIn(ParityCases()),
                                            ::testing::Values(0, 1), ::testing::Values(at::kFloat)),
                         Name);
INSTANTIATE_TEST_SUITE_P(BFloat16, EmuParityTest,
                         ::testing::Combine(::testing::ValuesIn(ParityCases()),
                                            ::testing::Values(1), ::testing::Values(at::kBFloat16)),
                         Name);

}  // namespace
}  // namespace pinion
