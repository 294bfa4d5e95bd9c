// What Captum does with layers, re-implemented for taps (hooks/attribution/tap.h), to compare with:
// the memory that it holds, the copies that it makes, and when it blocks the host. Semantics are
// those of captum/_utils/gradient.py and of LayerGradientXActivation, with one device and one
// tensor a layer.
//
//   const CaptumCall call = {.forward = forward, .layers = {"blocks.0"}, .inputs = {x}, ...};
//   const std::vector<at::Tensor> results = CaptumGradientXActivation(call, CaptumMode::kDefault);
//
// Where it is not the same, it is cheaper than Captum: the output's gradient is one tensor of ones,
// where Captum takes the output apart into one tensor per example.
//
// Thread safety: none. Errors: c10::Error.

#ifndef PINION_BENCH_ATTRIBUTION_CAPTUM_BASELINE_H_
#define PINION_BENCH_ATTRIBUTION_CAPTUM_BASELINE_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

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
  // The layers' values are kept as they are and go on as clones; before backward they are
  // concatenated on the device, which copies each; one backward returns all gradients, which are
  // concatenated as well; products are made on the device, and have a history.
  kDefault,
  // memory_efficient=True: values go to pageable memory one by one before backward, and are
  // concatenated there; gradients are concatenated on the device and then go, one by one; products
  // are made on the CPU.
  kMemoryEfficient,
};

// By layer.
std::vector<at::Tensor> CaptumGradientXActivation(const CaptumCall& call, CaptumMode mode);

// LayerActivation: clones, which are concatenated on the device when forward is over.
std::vector<at::Tensor> CaptumActivation(const CaptumCall& call);

// What a program does with results that it wants on the host: .cpu(), one by one.
std::vector<at::Tensor> ThenCpu(const std::vector<at::Tensor>& results);

}  // namespace pinion

#endif  // PINION_BENCH_ATTRIBUTION_CAPTUM_BASELINE_H_
