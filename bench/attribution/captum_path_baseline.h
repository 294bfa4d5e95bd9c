// Captum's methods along a path, re-implemented for taps (hooks/attribution/tap.h) as a baseline of
// memory. Paths lead from zeros to the inputs; the layer is one tensor. Semantics are those of
// captum/attr/_core and captum/attr/_utils/batching.py.
//
//   const CaptumPathCall call = {.forward = forward, .layer = "blocks.3", .input = x, ...};
//   const at::Tensor result = CaptumPath(PathMethod::kInternalInfluence, call);
//
// One difference makes the baseline cheaper: the output's gradient is one tensor of ones.
//
// Thread safety: none. Errors: c10::Error.

#ifndef PINION_BENCH_ATTRIBUTION_CAPTUM_PATH_BASELINE_H_
#define PINION_BENCH_ATTRIBUTION_CAPTUM_PATH_BASELINE_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "pinion/bench/attribution/path_table.h"
#include "pinion/hooks/attribution/attribution_session.h"
#include "pinion/hooks/attribution/gradient_shap.h"
#include "pinion/hooks/attribution/target.h"

namespace pinion {

struct CaptumPathCall {
  AttributedForward forward;
  std::string layer;
  at::Tensor input;
  Target target;
  int64_t n_steps = 0;              // or samples
  int64_t internal_batch_size = 0;  // 0, and LayerGradientShap: one batch
  ShapDraws draws = {};             // LayerGradientShap, from zeros
};

// Returns the result on the device.
at::Tensor CaptumPath(PathMethod method, const CaptumPathCall& call);

}  // namespace pinion

#endif  // PINION_BENCH_ATTRIBUTION_CAPTUM_PATH_BASELINE_H_
