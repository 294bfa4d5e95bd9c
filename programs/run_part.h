// Runs a part of a model, optionally as a checkpoint.
//
//   const auto part = [block](const torch::Tensor& in) mutable { return block(in); };
//   x = RunPart(config.checkpoint_blocks, part, x);
//
// The plan decides whether the checkpoint is recomputed. Checkpoints may nest. Backward may run the
// part again, so it owns its captures. A part frees moved inputs itself: it takes them as
// `torch::Tensor&`.

#ifndef PINION_PROGRAMS_RUN_PART_H_
#define PINION_PROGRAMS_RUN_PART_H_

#include <torch/types.h>

#include <utility>

#include "pinion/hooks/checkpoint/checkpoint.h"

namespace pinion {

template <typename Part, typename... Inputs>
torch::Tensor RunPart(bool is_checkpoint, const Part& part, Inputs&&... inputs) {
  if (!is_checkpoint) return part(inputs...);
  return checkpoint({.if_planned = true}, part, std::forward<Inputs>(inputs)...);
}

}  // namespace pinion

#endif  // PINION_PROGRAMS_RUN_PART_H_
