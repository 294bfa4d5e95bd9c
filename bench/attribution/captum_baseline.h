// Captum's attribution to layers and along paths, re-implemented for taps (hooks/attribution/tap.h)
// as a baseline: the same memory, copies and waits of the host. Semantics are those of
// captum/_utils/gradient.py, captum/attr/_core and captum/attr/_utils/batching.py, with one device
// and one tensor a layer. Paths lead from zeros to the inputs.
//
//   const CaptumCall call = {.forward = forward, .layers = {"blocks.0"}, .inputs = {x}, ...};
//   const std::vector<at::Tensor> results = CaptumGradientXActivation(call, CaptumMode::kDefault);
//   const CaptumPathCall path = {.forward = forward, .layer = "blocks.3", .input = x, ...};
//   const at::Tensor result = CaptumPath(PathMethod::kLayerConductance, path);
//
// One difference makes the baseline cheaper: the output's gradient is one tensor of ones, not one
// tensor per example.
//
// Thread safety: none. Errors: c10::Error.

#ifndef PINION_BENCH_ATTRIBUTION_CAPTUM_BASELINE_H_
#define PINION_BENCH_ATTRIBUTION_CAPTUM_BASELINE_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "pinion/bench/attribution/attribution_table.h"
#include "pinion/hooks/attribution/attribution_session.h"
#include "pinion/hooks/attribution/target.h"

namespace pinion {

struct CaptumCall {
  AttributedForward forward;
  std::vector<std::string> layers;
  std::vector<at::Tensor> inputs;
  Target target;
};

enum class CaptumMode {
  // Keeps the layers' values and passes clones on. Concatenates the values on the device before
  // backward, and all gradients after it. Products are made on the device, with autograd history.
  kDefault,
  // memory_efficient=True: copies values one by one to pageable memory before backward. Copies
  // gradients after concatenating them on the device. Products are made on the CPU.
  kMemoryEfficient,
};

// Returns one result per layer.
std::vector<at::Tensor> CaptumGradientXActivation(const CaptumCall& call, CaptumMode mode);

// LayerActivation: clones, concatenated on the device after forward.
std::vector<at::Tensor> CaptumActivation(const CaptumCall& call);

// Copies each result to the host by .cpu().
std::vector<at::Tensor> ThenCpu(const std::vector<at::Tensor>& results);

struct CaptumPathCall {
  AttributedForward forward;
  std::string layer;
  at::Tensor input;
  Target target;
  int64_t n_steps = 0;
  int64_t internal_batch_size = 0;  // 0: one batch
};

// Returns the result on the device.
at::Tensor CaptumPath(PathMethod method, const CaptumPathCall& call);

}  // namespace pinion

#endif  // PINION_BENCH_ATTRIBUTION_CAPTUM_BASELINE_H_
