// A part of a model that may be a checkpoint.
//
//   const auto part = [block](const torch::Tensor& in) mutable { return block(in); };
//   x = RunPart(config.checkpoint_blocks, part, x);
//
// A checkpoint on which a plan may decide, and which may have parts of its own. Backward may run
// it again, so it owns what it captures. Inputs that are moved are the part's to let go of: it
// takes those as `torch::Tensor&`.

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
