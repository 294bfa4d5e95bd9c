#include "pinion/bench/attribution/captum_baseline.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>

#include "pinion/bench/attribution/captum_hooks.h"
#include "pinion/device/host_arithmetic.h"
#include "pinion/hooks/attribution/tap.h"

namespace pinion {
std::vector<at::Tensor> CaptumGradientXActivation(const CaptumCall& call, CaptumMode mode) {
  const bool saves_memory = mode == CaptumMode::kMemoryEfficient;
  const at::AutoGradMode with_grad(true);
  std::vector<at::Tensor> raw, evals, gradients;
  {
    CaptumHooks hooks(call.layers, CaptumHooks::Saves::kRawAndGoesOnWithClones);
    at::Tensor output;
    {
      const TapScope taps(&hooks);
      output = call.target.Select(call.forward(call.inputs));
    }
    raw = hooks.TakeSaved();
    for (const at::Tensor& value : raw) {
      if (saves_memory) {
        evals.push_back(CaptumReduce(value.detach().cpu()));
        CountHostArithmetic(2 * value.nbytes());
      } else {
        evals.push_back(CaptumReduce(value));
      }
    }
    const std::vector<at::Tensor> all =
        torch::autograd::grad({output}, raw, {at::ones_like(output)});
    for (const at::Tensor& gradient : all) {
      const at::Tensor reduced = CaptumReduce(gradient);
      gradients.push_back(saves_memory ? reduced.cpu() : reduced);
    }
    raw.clear();
  }
  std::vector<at::Tensor> products;
  for (size_t i = 0; i < evals.size(); ++i) {
    products.push_back(gradients[i] * evals[i]);
    if (saves_memory) CountHostArithmetic(3 * products.back().nbytes());
  }
  return products;
}

std::vector<at::Tensor> CaptumActivation(const CaptumCall& call) {
  const at::NoGradGuard no_grad;
  CaptumHooks hooks(call.layers, CaptumHooks::Saves::kClones);
  {
    const TapScope taps(&hooks);
    call.forward(call.inputs);
  }
  const std::vector<at::Tensor> saved = hooks.TakeSaved();
  std::vector<at::Tensor> gathered;
  for (const at::Tensor& value : saved) gathered.push_back(CaptumReduce(value));
  return gathered;
}

std::vector<at::Tensor> ThenCpu(const std::vector<at::Tensor>& results) {
  std::vector<at::Tensor> on_host;
  for (const at::Tensor& result : results) on_host.push_back(result.detach().cpu());
  return on_host;
}

}  // namespace pinion
