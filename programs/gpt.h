// A GPT in plain torch::nn, without knowledge of offloading. Its blocks can be checkpoints, and are
// tapped ("blocks.3"; hooks/attribution/tap.h).
//
// Thread safety: as torch::nn::Module.

#ifndef PINION_PROGRAMS_GPT_H_
#define PINION_PROGRAMS_GPT_H_

#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include "pinion/programs/gpt_config.h"

namespace pinion {

// Pre-norm decoder with learned positions: embeddings, `layers` blocks, a norm and a head.
class GptImpl : public torch::nn::Module {
 public:
  // Draws the initial weights from torch's CPU generator.
  explicit GptImpl(const GptConfig& config);

  // Maps tokens, int64 [batch, sequence], to logits [batch, sequence, vocabulary].
  torch::Tensor forward(const torch::Tensor& tokens);

 private:
  GptConfig config_;
  torch::nn::Embedding token_embedding_;
  torch::nn::Embedding position_embedding_;
  torch::nn::ModuleList blocks_;
  torch::nn::LayerNorm final_norm_;
  torch::nn::Linear head_;
};
TORCH_MODULE(Gpt);

}  // namespace pinion

#endif  // PINION_PROGRAMS_GPT_H_
