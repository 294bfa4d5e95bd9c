#include "pinion/bench/offload/offload_model.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/zeros_like.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <cstdint>
#include <map>
#include <optional>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/bench/bench_main.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/plan/step_recorder.h"
#include "pinion/programs/conv_net.h"
#include "pinion/programs/gpt.h"
#include "pinion/programs/gpt_config.h"
#include "pinion/programs/u_net.h"

namespace pinion {
namespace {

constexpr uint64_t kSeed = 1;
constexpr ConvNetConfig kConvNet = {};
constexpr UNetConfig kUNet = {};
// Image size of the large network over the size of the small one.
constexpr double kImageScale = 64;

GptConfig SmallGpt(bool bfloat16) {
  return {.layers = 6,
          .width = 256,
          .heads = 4,
          .sequence = 256,
          .batch = 4,
          .vocabulary = 128,
          .bfloat16 = bfloat16};
}

GptConfig LargeGpt(bool bfloat16) {
  return {.layers = 32,
          .width = 4096,
          .heads = 32,
          .sequence = 4096,
          .batch = 1,
          .vocabulary = 32000,
          .bfloat16 = bfloat16};
}

Workload WorkloadOf(const GptConfig& config) {
  const double saved_bytes = static_cast<double>(SavedBytes(config));
  return {.flops_per_saved_byte = StepFlops(config) / saved_bytes,
          .mean_saved_tensor_bytes = saved_bytes / static_cast<double>(SavedTensors(config))};
}

// Keeps tensors as autograd does, and numbers the segments that a plan could recompute.
class KeepAll final : public SavedTensorPacker {
 public:
  std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace&) override {
    return KeepTensor(tensor);
  }
  std::optional<uint32_t> KeepSegment(const SegmentBegin&) override { return segments_++; }

 private:
  uint32_t segments_ = 0;
};

}  // namespace

std::string OffloadModel::name() const {
  const char* const kinds[] = {"gpt", "convnet", "unet"};
  return absl::StrCat(kinds[static_cast<int>(kind)], autocast ? " autocast" : " float32");
}

absl::StatusOr<ModelsToRun> FindModelsToRun(const std::vector<std::string>& models,
                                            const std::vector<std::string>& presets, bool quick) {
  ModelsToRun run;
  PINION_ASSIGN_OR_RETURN(run.presets, PresetsToRun(presets, quick));
  for (const auto kind :
       {OffloadModel::Kind::kGpt, OffloadModel::Kind::kConvNet, OffloadModel::Kind::kUNet}) {
    for (const bool autocast : {false, true}) {
      const OffloadModel model = {kind, autocast};
      const auto asks = [&](const std::string& of) { return absl::StartsWith(model.name(), of); };
      if (models.empty() || std::any_of(models.begin(), models.end(), asks)) {
        run.models.push_back(model);
      }
    }
  }
  if (run.models.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("--models=", absl::StrJoin(models, ","),
                                                   " names none of gpt, convnet and unet"));
  }
  if (quick) run.models.resize(1);
  return run;
}

absl::StatusOr<DevicePreset> PresetFor(const OffloadModel& model, const std::string& preset) {
  PINION_ASSIGN_OR_RETURN(const DevicePreset base, FindPreset(preset));
  if (model.kind == OffloadModel::Kind::kGpt) {
    return ScalePreset(base, WorkloadOf(LargeGpt(model.autocast)),
                       WorkloadOf(SmallGpt(model.autocast)));
  }
  // FLOPs per byte do not depend on the size of an image.
  return ScalePreset(base, {.flops_per_saved_byte = 1, .mean_saved_tensor_bytes = kImageScale},
                     {.flops_per_saved_byte = 1, .mean_saved_tensor_bytes = 1});
}

ModelOnDevice PutGptOn(const GptConfig& config, c10::Device device) {
  torch::manual_seed(kSeed);
  Gpt gpt(config);
  if (config.bfloat16) gpt->to(at::kBFloat16);
  gpt->to(device);
  const auto tokens = [&](at::IntArrayRef sizes) {
    return at::randint(config.vocabulary, sizes, at::kLong).to(device);
  };
  ModelOnDevice made;
  made.module = gpt.ptr();
  made.forward = [gpt](const at::Tensor& x) { return gpt.ptr()->forward(x).flatten(0, 1); };
  made.input = tokens({config.batch, config.sequence});
  made.target = tokens({config.tokens()});
  return made;
}

ModelOnDevice PutModelOn(const OffloadModel& model, c10::Device device, bool checkpoints) {
  torch::manual_seed(kSeed);
  const auto images = [](int64_t batch, int64_t size) { return at::rand({batch, 3, size, size}); };
  ModelOnDevice made;
  switch (model.kind) {
    case OffloadModel::Kind::kGpt: {
      GptConfig config = SmallGpt(/*bfloat16=*/false);
      config.checkpoint_blocks = checkpoints;
      made = PutGptOn(config, device);
      break;
    }
    case OffloadModel::Kind::kConvNet: {
      ConvNetConfig config = kConvNet;
      config.checkpoint_blocks = checkpoints;
      const ConvNet net(config);
      made.module = net.ptr();
      made.forward = [net](const at::Tensor& x) { return net.ptr()->forward(x); };
      made.input = images(16, 32);
      made.target = at::randint(config.classes, {16}, at::kLong);
      break;
    }
    case OffloadModel::Kind::kUNet: {
      UNetConfig config = kUNet;
      config.checkpoint_levels = checkpoints;
      const UNet net(config);
      made.module = net.ptr();
      made.forward = [net](const at::Tensor& x) { return net.ptr()->forward(x); };
      made.input = images(4, 64);
      made.target = images(4, 64);
      break;
    }
  }
  made.module->to(device);
  made.input = made.input.to(device);
  made.target = made.target.to(device);
  if (model.autocast) {
    const auto autocast = [device, plain = std::move(made.forward)](const at::Tensor& x) {
      at::autocast::set_autocast_enabled(device.type(), true);
      at::autocast::set_autocast_dtype(device.type(), at::kBFloat16);
      at::autocast::increment_nesting();
      const absl::Cleanup leave = [device] {
        if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
        at::autocast::set_autocast_enabled(device.type(), false);
      };
      return plain(x);
    };
    made.forward = [autocast](const at::Tensor& x) { return autocast(x).to(at::kFloat); };
  }
  return made;
}

ModelStep::ModelStep(ModelOnDevice model) : model_(std::move(model)) {
  for (at::Tensor& parameter : model_.module->parameters()) {
    parameter.mutable_grad() = at::zeros_like(parameter);
  }
}

at::Tensor ModelStep::Loss() const {
  const at::Tensor made = model_.forward(model_.input);
  return model_.target.is_floating_point() ? at::mse_loss(made, model_.target)
                                           : at::cross_entropy_loss(made, model_.target);
}

void ModelStep::Run(const ReplayedStep::MakeScope& make_scope) {
  for (const at::Tensor& parameter : model_.module->parameters()) parameter.grad().zero_();
  at::Tensor loss;
  {
    const std::shared_ptr<void> scope = make_scope();
    loss = Loss();
  }
  loss.backward();
}

absl::StatusOr<StepTrace> ModelStep::Record(const DeviceBackend& backend, bool keep_checkpoints) {
  PINION_ASSIGN_OR_RETURN(const std::shared_ptr<StepRecorder> recorder,
                          StepRecorder::Create(backend));
  struct Scopes {
    Scopes(const std::shared_ptr<StepRecorder>& recorder, bool keep) : record(recorder) {
      if (keep) kept.emplace(std::make_shared<KeepAll>());
    }
    const RecordScope record;
    std::optional<SavedTensorScope> kept;
  };
  Run([&] { return std::make_shared<Scopes>(recorder, keep_checkpoints); });
  using Steps = std::map<int, StepTrace>;
  PINION_ASSIGN_OR_RETURN(Steps steps, recorder->Finish());
  return std::move(steps[model_.input.device().index()]);
}

std::vector<at::Tensor> ModelStep::Gradients() const {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : model_.module->parameters()) {
    gradients.push_back(parameter.grad().cpu());
  }
  return gradients;
}

}  // namespace pinion
