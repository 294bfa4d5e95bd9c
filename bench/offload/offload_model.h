// Models that benchmarks run, small enough for a CPU, and devices scaled so that they behave
// like large models.
//
//   for (const OffloadModel& model : run.models) {
//     PINION_ASSIGN_OR_RETURN(const DevicePreset preset, PresetFor(model, "a100_pcie4"));
//     ... an emulated machine of that preset is registered ...
//     ModelStep step(PutModelOn(model, device, /*checkpoints=*/false));
//     step.Run(make_scope);                  // one forward and its backward, with values
//
// Thread safety: none; LibTorch's seed and autocast are those of the calling thread.

#ifndef PINION_BENCH_OFFLOAD_OFFLOAD_MODEL_H_
#define PINION_BENCH_OFFLOAD_OFFLOAD_MODEL_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "pinion/bench/offload/replayed_step.h"
#include "pinion/device/device_backend.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/programs/gpt_config.h"

namespace pinion {

struct OffloadModel {
  enum class Kind { kGpt, kConvNet, kUNet };
  Kind kind = Kind::kGpt;
  bool autocast = false;  // bfloat16 where autocast says so; otherwise float32 throughout

  std::string name() const;  // "gpt float32", "unet autocast"
};

struct ModelsToRun {
  std::vector<OffloadModel> models;  // whose names begin with one of --models; --quick: one
  std::vector<std::string> presets;  // bench_main.h
};
// Parses --models, --presets and --quick. InvalidArgument lists the kinds if no model matches.
// Errors of PresetsToRun.
absl::StatusOr<ModelsToRun> FindModelsToRun(const std::vector<std::string>& models,
                                            const std::vector<std::string>& presets, bool quick);

// Returns a preset scaled to the model as the named device is to a large model: a GPT of width 4096
// at sequence length 4096, or images of 64 times the bytes. NotFound lists the presets.
absl::StatusOr<DevicePreset> PresetFor(const OffloadModel& model, const std::string& preset);

// A model on a device in training mode, with a batch.
struct ModelOnDevice {
  std::shared_ptr<torch::nn::Module> module;
  // input -> logits [examples, classes] or images; float32 under the model's autocast.
  std::function<at::Tensor(const at::Tensor& input)> forward;
  at::Tensor input, target;
};
// Blocks are checkpoints if `checkpoints`: a layer of the GPT, a residual block, or a level of the
// U-Net on the way down or up.
ModelOnDevice PutModelOn(const OffloadModel& model, c10::Device device, bool checkpoints);
ModelOnDevice PutGptOn(const GptConfig& config, c10::Device device);

inline bool SameBits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const at::Tensor& x, const at::Tensor& y) { return x.equal(y); });
}

// Forward and backward. The weights never change, so that all steps are alike.
class ModelStep {
 public:
  explicit ModelStep(ModelOnDevice model);

  void Run(const ReplayedStep::MakeScope& make_scope);
  // What one more step saves and reads, on this device; spoils the gradients. If checkpoints are
  // kept, they are the record's segments, which a plan could compute again.
  absl::StatusOr<StepTrace> Record(const DeviceBackend& backend, bool keep_checkpoints);
  // Of the last step, on the CPU.
  std::vector<at::Tensor> Gradients() const;

  std::vector<at::Tensor> Parameters() const { return model_.module->parameters(); }

 private:
  at::Tensor Loss() const;

  const ModelOnDevice model_;
};

}  // namespace pinion

#endif  // PINION_BENCH_OFFLOAD_OFFLOAD_MODEL_H_
