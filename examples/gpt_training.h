// A GPT in training on an accelerator, with or without offload: model, gradients, optimizer, one
// step, and checkpoint files.
//
//   GptTraining training(options, text, accelerator, session, steps_done);
//   PINION_RETURN_IF_ERROR(training.Build(tier));
//   const float loss = training.Step();
//
// Thread safety: none.
// Ownership: refers to the constructor's arguments.

#ifndef PINION_EXAMPLES_GPT_TRAINING_H_
#define PINION_EXAMPLES_GPT_TRAINING_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/device/trace/trace_sink.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/engine/tier/host_tier.h"
#include "pinion/examples/text_data.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/weights/weight_offloader.h"
#include "pinion/programs/accelerator.h"
#include "pinion/programs/gpt.h"
#include "pinion/programs/run_options.h"

namespace pinion {

// AdamW as one operator over all parameters. The dozen operators per parameter of
// torch::optim::AdamW would outweigh a small model's own work.
class FusedAdamW {
 public:
  // Allocates its state on the parameters' device.
  explicit FusedAdamW(std::vector<at::Tensor> parameters);

  // `step` counts from 1.
  void Step(const std::vector<at::Tensor>& gradients, int64_t step);

  const std::vector<at::Tensor>& means() const { return means_; }
  const std::vector<at::Tensor>& squares() const { return squares_; }

 private:
  std::vector<at::Tensor> parameters_, means_, squares_;
};

class GptTraining {
 public:
  // With a null session activations are not offloaded. `steps_done` counts completed steps,
  // including those of a resumed run.
  GptTraining(const RunOptions& options, const TextData& text, Accelerator& accelerator,
              std::shared_ptr<OffloadSession> session, int64_t& steps_done);

  // Call it once, first. `tier` has the options of the host tier for weights on the host.
  absl::Status Build(const HostTierOptions& tier);

  // Returns the loss.
  float Step();

  // What one more step saves and reads. Spoils the gradients.
  absl::StatusOr<StepTrace> RecordStep();

  // Writes the files that the options name.
  absl::Status WriteFiles() const;

  // Returns the last step's gradients in one tensor. With weights on the host only for comparisons.
  const at::Tensor& all_gradients() const { return all_gradients_; }
  // Returns null if the weights are on the device.
  const WeightOffloader* weights() const { return weights_.get(); }
  uint64_t StateBytes() const;

 private:
  struct Batch {
    at::Tensor inputs, targets;  // [batch, sequence], on the device
  };

  void StepOnHost(int64_t step);
  void MakeGradients();
  Batch UploadBatch(int64_t step) const;
  at::Tensor Loss(const Batch& batch);
  std::string Description() const;
  std::map<std::string, at::Tensor> State() const;
  absl::Status Resume();

  const RunOptions& options_;
  const TextData& text_;
  Accelerator& accelerator_;
  const std::shared_ptr<TraceSink> trace_;         // null without a trace
  const std::shared_ptr<OffloadSession> session_;  // null without offload
  int64_t& steps_done_;                            // the caller's: survives exceptions

  Gpt model_ = nullptr;
  std::vector<at::Tensor> parameters_, gradients_;
  at::Tensor all_gradients_;
  std::unique_ptr<WeightOffloader> weights_;
  std::optional<FusedAdamW> optimizer_;
};

}  // namespace pinion

#endif  // PINION_EXAMPLES_GPT_TRAINING_H_
