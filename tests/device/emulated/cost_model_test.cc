#include "pinion/device/emulated/cost_model.h"

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace {

using ::pinion::testing::IsOk;
using ::pinion::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(CostModelTest, EveryPresetIsValidAndSaysThatItIsModelled) {
  ASSERT_EQ(PresetNames().size(), 5u);
  for (const std::string& name : PresetNames()) {
    const DevicePreset preset = FindPreset(name).value();
    EXPECT_EQ(preset.name, name);
    EXPECT_THAT(preset.Validate(), IsOk());
    EXPECT_THAT(preset.description, HasSubstr("modelled"));
    EXPECT_LE(preset.link.h2d_duplex_gb_per_s, preset.link.h2d_gb_per_s) << name;
    EXPECT_LE(preset.link.d2h_duplex_gb_per_s, preset.link.d2h_gb_per_s) << name;
    EXPECT_LT(preset.link.pageable_gb_per_s, preset.link.d2h_duplex_gb_per_s) << name;
    EXPECT_GT(preset.host_memory_gb_per_s, preset.link.h2d_gb_per_s) << name;
    EXPECT_LT(preset.host_memory_gb_per_s, preset.memory_gb_per_s) << name;
  }
}

struct Field {
  const char* name;
  double& (*of)(DevicePreset&);
  bool may_be_zero;
};
#define PINION_FIELD(field, may_be_zero)                                               \
  {                                                                                    \
#field, [](DevicePreset & preset) -> double& { return preset.field; }, may_be_zero \
  }
const Field kFields[] = {
    PINION_FIELD(float32_tflop_per_s, false),
    PINION_FIELD(bfloat16_tflop_per_s, false),
    PINION_FIELD(float64_tflop_per_s, false),
    PINION_FIELD(memory_gb_per_s, false),
    PINION_FIELD(launch_us, true),
    PINION_FIELD(host_call_us, true),
    PINION_FIELD(host_event_us, true),
    PINION_FIELD(pin_ms_per_gib, true),
    PINION_FIELD(host_memory_gb_per_s, false),
    PINION_FIELD(link.rated_gb_per_s, true),
    PINION_FIELD(link.h2d_gb_per_s, false),
    PINION_FIELD(link.d2h_gb_per_s, false),
    PINION_FIELD(link.h2d_duplex_gb_per_s, false),
    PINION_FIELD(link.d2h_duplex_gb_per_s, false),
    PINION_FIELD(link.host_gb_per_s, true),
    PINION_FIELD(link.fixed_us, true),
    PINION_FIELD(link.piece_us, true),
    PINION_FIELD(link.pageable_gb_per_s, false),
};
#undef PINION_FIELD

TEST(CostModelTest, AConstantThatMakesNoSenseIsRefusedByName) {
  for (const auto& [name, of, may_be_zero] : kFields) {
    SCOPED_TRACE(name);
    DevicePreset preset;
    for (const double value : {-1.0, std::numeric_limits<double>::infinity(),
                               std::numeric_limits<double>::quiet_NaN()}) {
      of(preset) = value;
      EXPECT_THAT(
          preset.Validate(),
          StatusIs(absl::StatusCode::kInvalidArgument,
                   AllOf(HasSubstr(std::string(name) + " is " + std::to_string(value)),
                         HasSubstr("finite"), HasSubstr(may_be_zero ? "at least 0" : "positive"))));
    }
    of(preset) = 0;
    EXPECT_EQ(preset.Validate().ok(), may_be_zero);
  }
}

TEST(CostModelTest, ALinkThatNobodyDescribedIsZeros) {
  DevicePreset preset;
  preset.link = LinkModel();
  for (const auto& [name, of, may_be_zero] : kFields) {
    if (!std::string(name).starts_with("link.")) continue;
    EXPECT_EQ(of(preset), 0) << name;
  }
  EXPECT_FALSE(preset.link.one_copy_at_a_time);
}

TEST(CostModelTest, DefaultPresetIsH100OnPcie5) { EXPECT_EQ(DevicePreset().name, "h100_pcie5"); }

TEST(CostModelTest, UnknownPresetNamesTheKnownOnes) {
  EXPECT_THAT(FindPreset("tpu"),
              StatusIs(absl::StatusCode::kNotFound,
                       AllOf(HasSubstr("tpu"), HasSubstr(": a100_pcie4, h100_pcie5, "),
                             HasSubstr("gb200_c2c"))));
}

TEST(CostModelTest, KernelTakesTheSlowerOfComputeAndMemoryPlusItsLaunch) {
  DevicePreset preset;
  preset.launch_us = 2;
  preset.bfloat16_tflop_per_s = 100;
  preset.float64_tflop_per_s = 1;
  preset.memory_gb_per_s = 1000;
  EXPECT_DOUBLE_EQ(KernelMs(preset, 1e11, 1e6, ComputeType::kBFloat16), 1.002);
  EXPECT_DOUBLE_EQ(KernelMs(preset, 1e9, 1e6, ComputeType::kFloat64), 1.002);
  EXPECT_DOUBLE_EQ(KernelMs(preset, 1e3, 1e9, ComputeType::kBFloat16), 1.002);
  EXPECT_DOUBLE_EQ(KernelMs(preset, 0, 0, ComputeType::kFloat32), 0.002);
}

TEST(CostModelTest, HalfPerformanceSizeOfPcie5IsThatOfTheMeasurements) {
  const LinkModel link = DevicePreset().link;
  const double bytes = link.fixed_us * 1e-6 * link.h2d_gb_per_s * 1e9;
  EXPECT_NEAR(bytes, 170e3, 20e3);
}

// Compute, memory traffic and fixed costs per saved tensor, relative to its transfer time.
std::vector<double> RatiosOf(const DevicePreset& preset, const Workload& workload) {
  const double bytes = workload.mean_saved_tensor_bytes;
  const double flops = bytes * workload.flops_per_saved_byte;
  const double launch_ms = preset.launch_us * 1e-3;
  std::vector<double> ratios = {KernelMs(preset, flops, 0, ComputeType::kBFloat16) - launch_ms,
                                KernelMs(preset, 0, 3 * bytes, ComputeType::kBFloat16) - launch_ms,
                                launch_ms, preset.host_call_us, preset.link.fixed_us};
  for (double& ratio : ratios) ratio /= bytes / (preset.link.d2h_gb_per_s * 1e6);
  return ratios;
}

TEST(CostModelDeathTest, AWorkloadOfNothingIsNamedWithItsValues) {
  const double inf = std::numeric_limits<double>::infinity();
  const DevicePreset base;
  const Workload good = {.flops_per_saved_byte = 6000, .mean_saved_tensor_bytes = 64e6};
  for (const double bad : {0.0, -1.0, inf, std::numeric_limits<double>::quiet_NaN()}) {
    for (const Workload& wrong : {Workload{bad, 64e6}, Workload{6000, bad}}) {
      EXPECT_DEATH(ScalePreset(base, wrong, good), "both must be positive and finite");
      EXPECT_DEATH(ScalePreset(base, good, wrong), "both must be positive and finite");
    }
  }
  EXPECT_DEATH(ScalePreset(base, {0, 8}, good),
               "flops_per_saved_byte 0 and mean_saved_tensor_bytes 8");
}

TEST(CostModelDeathTest, AKernelOfNoCostIsNamedWithItsValues) {
  const double inf = std::numeric_limits<double>::infinity();
  const DevicePreset preset;
  for (const double bad : {-1.0, inf, std::numeric_limits<double>::quiet_NaN()}) {
    for (const auto& [flops, bytes] : {std::pair(bad, 8.0), std::pair(8.0, bad)}) {
      EXPECT_DEATH(KernelMs(preset, flops, bytes, ComputeType::kFloat32),
                   "both must be finite and at least 0");
    }
  }
  EXPECT_DEATH(KernelMs(preset, -1, 8, ComputeType::kFloat32), "-1 flops and 8 memory_bytes");
}

TEST(CostModelTest, ScaledPresetKeepsEveryProportionOfTheLargeModel) {
  const Workload large = {.flops_per_saved_byte = 6000, .mean_saved_tensor_bytes = 64e6};
  const Workload small = {.flops_per_saved_byte = 150, .mean_saved_tensor_bytes = 256e3};
  for (const std::string& name : PresetNames()) {
    const DevicePreset base = FindPreset(name).value();
    const DevicePreset scaled = ScalePreset(base, large, small);
    const std::vector<double> before = RatiosOf(base, large), after = RatiosOf(scaled, small);
    for (size_t i = 0; i < before.size(); ++i) {
      EXPECT_NEAR(after[i] / before[i], 1, 1e-9) << name << ", ratio " << i;
    }
    EXPECT_NEAR(scaled.float32_tflop_per_s / base.float32_tflop_per_s, 150.0 / 6000, 1e-9);
    EXPECT_NEAR(scaled.float64_tflop_per_s / base.float64_tflop_per_s, 150.0 / 6000, 1e-9);
    EXPECT_NEAR(scaled.host_event_us / base.host_event_us, 256e3 / 64e6, 1e-9);
    EXPECT_NEAR(scaled.link.piece_us / base.link.piece_us, 256e3 / 64e6, 1e-9);
    EXPECT_EQ(scaled.host_memory_gb_per_s, base.host_memory_gb_per_s);
    EXPECT_EQ(scaled.name, name + "_scaled");
    EXPECT_THAT(scaled.Validate(), IsOk());
    EXPECT_THAT(scaled.description, AllOf(HasSubstr("modelled"), HasSubstr("scaled")));
  }
}

}  // namespace
}  // namespace pinion
