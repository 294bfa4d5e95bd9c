// What Captum does along paths from baselines of zeros to inputs, of one layer that is one tensor,
// re-implemented for taps (hooks/attribution/tap.h), to compare with: the memory that it holds.
// Semantics are those of captum/attr/_core and of captum/attr/_utils/batching.py.
//
//   const CaptumPathCall call = {.forward = forward, .layer = "blocks.3", .input = x, ...};
//   const at::Tensor result = CaptumPath(PathMethod::kInternalInfluence, call);
//
// Where it is not the same, it is cheaper than Captum: the output's gradient is one tensor of ones.
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
  int64_t internal_batch_size = 0;  // 0: one batch. LayerGradientShap has no other way
  ShapDraws draws = {};             // of LayerGradientShap, out of a distribution of zeros
};

// On the device.
at::Tensor CaptumPath(PathMethod method, const CaptumPathCall& call);

}  // namespace pinion

#endif  // PINION_BENCH_ATTRIBUTION_CAPTUM_PATH_BASELINE_H_
