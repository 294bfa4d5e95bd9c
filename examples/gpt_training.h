// A GPT in training on an accelerator, with or without offload: its model, gradients and optimizer,
// what a step does, and the files from which a run goes on.
//
//   GptTraining training(options, text, accelerator, session, steps_done);
//   PINION_RETURN_IF_ERROR(training.Build(tier));
//   const float loss = training.Step();
//
// Thread safety: none.
// Ownership: refers to what it was made from.

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
#include "pinion/examples/fused_adamw.h"
#include "pinion/examples/text_data.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/weights/weight_offloader.h"
#include "pinion/programs/accelerator.h"
#include "pinion/programs/gpt.h"
#include "pinion/programs/run_options.h"

namespace pinion {

class GptTraining {
 public:
  // A null session: without offload of activations. Counts the steps that are done in `steps_done`,
  // those of a resumed run included.
  GptTraining(const RunOptions& options, const TextData& text, Accelerator& accelerator,
              std::shared_ptr<OffloadSession> session, int64_t& steps_done);

  // Once, before all else. Weights that rest on the host do so in the tier with these options.
  absl::Status Build(const HostTierOptions& tier);

  // Returns the loss.
  float Step();

  // What one more step saves and reads. Spoils the gradients.
  absl::StatusOr<StepTrace> RecordStep();

  // Those that the options name.
  absl::Status WriteFiles() const;

  // Of the last step, one after the other; where weights rest on the host, only for a comparison.
  const at::Tensor& all_gradients() const { return all_gradients_; }
  // Null where the device has the weights.
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
  int64_t& steps_done_;                            // the caller's: it outlives what throws

  Gpt model_ = nullptr;
  std::vector<at::Tensor> parameters_, gradients_;
  at::Tensor all_gradients_;
  std::unique_ptr<WeightOffloader> weights_;
  std::optional<FusedAdamW> optimizer_;
};

}  // namespace pinion

#endif  // PINION_EXAMPLES_GPT_TRAINING_H_
