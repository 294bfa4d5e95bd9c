#include "pinion/programs/gpt_config.h"

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/device/emulated/cost_model.h"

namespace pinion {
namespace {

using ::testing::DoubleNear;
using ::testing::HasSubstr;

GptConfig Small() {
  GptConfig config = *FindGptSize("small");
  config.vocabulary = 63;
  return config;
}

TEST(GptConfig, EveryNamedSizeIsValid) {
  for (const std::string& name : GptSizeNames()) {
    EXPECT_EQ(FindGptSize(name)->Validate(), absl::OkStatus()) << name;
  }
}

TEST(GptConfig, AnUnknownSizeIsRefusedWithTheNamesThatThereAre) {
  const absl::StatusOr<GptConfig> config = FindGptSize("huge");
  EXPECT_EQ(config.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(config.status().message()), HasSubstr("tiny, small, medium, large"));
}

TEST(GptConfig, ValidateNamesTheFlagAndItsValue) {
  GptConfig config = Small();
  config.heads = 3;
  EXPECT_THAT(std::string(config.Validate().message()), HasSubstr("--heads=3"));
  config = Small();
  config.batch = 0;
  EXPECT_THAT(std::string(config.Validate().message()), HasSubstr("--batch=0"));
  config = Small();
  config.dropout = 1;
  EXPECT_THAT(std::string(config.Validate().message()), HasSubstr("--dropout=1"));
}

TEST(GptConfig, BFloat16HalvesEveryByteCount) {
  GptConfig half = Small();
  half.bfloat16 = true;
  EXPECT_EQ(PersistentBytes(half) * 2, PersistentBytes(Small()));
  EXPECT_EQ(SavedBytes(half) * 2, SavedBytes(Small()));
}

// The scaled preset must keep the large model's ratio of compute to transfer, whatever the small
// model's shape is.
TEST(ScaledDevice, KeepsTheLargeModelsRatioOfComputeToTransfer) {
  const auto compute_per_transfer = [](const GptConfig& config) {
    const DevicePreset preset = ScaledDeviceFor(config)->preset;
    const double compute_ms = StepFlops(config) / (preset.float32_tflop_per_s * 1e9);
    return compute_ms / (SavedBytes(config) / (preset.link.d2h_gb_per_s * 1e6));
  };
  // 3 (24 h + 2 s) FLOPs per token and unit of width over 34 bytes, with h = s = 4096.
  const DevicePreset base = *FindPreset("gh200_c2c");
  const double large = 3 * (24 * 4096 + 2 * 4096) / 34.0 * base.link.d2h_gb_per_s /
                       (base.bfloat16_tflop_per_s * 1e3);
  GptConfig wide = Small();
  wide.width = 512;
  wide.sequence = 64;
  EXPECT_THAT(compute_per_transfer(Small()), DoubleNear(large, 0.01 * large));
  EXPECT_THAT(compute_per_transfer(wide), DoubleNear(large, 0.01 * large));
}

}  // namespace
}  // namespace pinion
