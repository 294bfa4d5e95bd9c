#include "pinion/programs/gpt_config.h"

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/device/emulated/cost_model.h"

namespace pinion {
namespace {

struct NamedSize {
  const char* name;
  int64_t layers, width, heads, sequence, batch;
};

constexpr NamedSize kSizes[] = {
    {"tiny", 8, 64, 2, 64, 4},     {"small", 12, 128, 4, 256, 8}, {"medium", 16, 256, 8, 256, 8},
    {"large", 24, 512, 8, 512, 8}, {"wide", 6, 512, 8, 256, 4},
};

// Above this limit arithmetic on sizes could overflow; no host could store it.
constexpr double kMostLayerElements = 1e12;

// Saved elements of a layer, per token and unit of width. The layer norms' inputs are 2, their
// outputs 2. Queries, keys and values are 3. The attention's output is 1. The wide layer is 4
// before its activation function and 4 after.
constexpr int64_t kSavedWidths = 16;
// The number of these tensors. Queries, keys and values are views of one. Five more hold a number
// per token or head: means and deviations of the norms, and attention's normalisers.
constexpr int64_t kSavedTensors = 8 + 5;
// The two masks of dropout.
constexpr int64_t kDropoutMasks = 2;

// The large model that the scaled preset stands for, trained in bfloat16 with dropout. It saves 34
// bytes per token and unit of width in ten tensors, and the five small ones: Korthikanti et al.,
// "Reducing Activation Recomputation in Large Transformer Models", with flash attention.
constexpr char kLargeLink[] = "gh200_c2c";
constexpr double kLargeWidth = 4096;
constexpr double kLargeSequence = 4096;
constexpr double kLargeSavedBytes = 34;
constexpr double kLargeSavedTensors = 10 + 5;

// FLOPs of a layer per token and unit of width: 24 for the four matrix products, two per position
// that causal attention sees. Backward costs twice forward.
double LayerFlops(double width, double sequence) { return 3 * (24 * width + 2 * sequence); }

}  // namespace

absl::Status GptConfig::Validate() const {
  const struct {
    const char* name;
    int64_t value;
  } positive[] = {{"--layers", layers},
                  {"--width", width},
                  {"--heads", heads},
                  {"--sequence", sequence},
                  {"--batch", batch}};
  for (const auto& [name, value] : positive) {
    if (value < 1 || value > 1'000'000) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, "=", value, " must be between 1 and 1000000"));
    }
  }
  if (width % heads != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--width=", width, " must be a multiple of --heads=", heads));
  }
  if (static_cast<double>(layers) * width * width > kMostLayerElements ||
      static_cast<double>(width) * batch * sequence > kMostLayerElements) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--layers=", layers, " --width=", width, " --batch=", batch, " --sequence=", sequence,
        " make a model or a step of more than 1e12 numbers; choose smaller ones"));
  }
  if (!(dropout >= 0 && dropout < 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--dropout=", dropout, " must be at least 0 and below 1"));
  }
  return absl::OkStatus();
}

absl::StatusOr<GptConfig> FindGptSize(const std::string& name) {
  for (const NamedSize& size : kSizes) {
    if (name != size.name) continue;
    GptConfig config;
    config.layers = size.layers;
    config.width = size.width;
    config.heads = size.heads;
    config.sequence = size.sequence;
    config.batch = size.batch;
    return config;
  }
  return absl::NotFoundError(absl::StrCat("no model size is named \"", name,
                                          "\"; there are: ", absl::StrJoin(GptSizeNames(), ", ")));
}

std::vector<std::string> GptSizeNames() {
  std::vector<std::string> names;
  for (const NamedSize& size : kSizes) names.push_back(size.name);
  return names;
}

int64_t ParameterCount(const GptConfig& config) {
  const int64_t w = config.width;
  const int64_t layer = 12 * w * w + 9 * w /* biases */ + 4 * w /* layer norms */;
  return config.layers * layer + 2 * config.vocabulary * w + config.sequence * w + 2 * w;
}

uint64_t PersistentBytes(const GptConfig& config) {
  return 4 * ParameterCount(config) * config.element_bytes();
}

uint64_t SavedBytes(const GptConfig& config) {
  const int64_t widths = kSavedWidths + (config.dropout > 0 ? kDropoutMasks : 0);
  const uint64_t layer = widths * config.width * config.tokens();
  // The last layer norm's input and output, and the log of the softmax.
  const uint64_t rest = (2 * config.width + config.vocabulary) * config.tokens();
  return (config.layers * layer + rest) * config.element_bytes();
}

int64_t SavedTensors(const GptConfig& config) {
  return config.layers * (kSavedTensors + (config.dropout > 0 ? kDropoutMasks : 0)) + 3;
}

double StepFlops(const GptConfig& config) {
  const double width = config.width;
  const double layers = config.layers * width * LayerFlops(width, config.sequence);
  const double head = 3 * 2 * width * config.vocabulary;
  return config.tokens() * (layers + head);
}

absl::StatusOr<ScaledDevice> ScaledDeviceFor(const GptConfig& config) {
  PINION_ASSIGN_OR_RETURN(DevicePreset base, FindPreset(kLargeLink));
  // The small model's float32 stands for the large one's bfloat16.
  if (!config.bfloat16) base.float32_tflop_per_s = base.bfloat16_tflop_per_s;

  Workload large;
  large.flops_per_saved_byte = LayerFlops(kLargeWidth, kLargeSequence) / kLargeSavedBytes;
  large.mean_saved_tensor_bytes =
      kLargeSavedBytes * kLargeWidth * kLargeSequence / kLargeSavedTensors;
  Workload small;
  small.flops_per_saved_byte = StepFlops(config) / SavedBytes(config);
  small.mean_saved_tensor_bytes = static_cast<double>(SavedBytes(config)) / SavedTensors(config);

  ScaledDevice scaled;
  scaled.preset = ScalePreset(base, large, small);
  scaled.stands_for = absl::StrCat("a GPT of width ", kLargeWidth, " at sequence length ",
                                   kLargeSequence, " in bfloat16 on ", kLargeLink);
  return scaled;
}

}  // namespace pinion
