#include "pinion/bench/attribution/captum_baseline.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <functional>
#include <map>
#include <string_view>
#include <utility>

#include "absl/types/span.h"
#include "pinion/device/host_arithmetic.h"
#include "pinion/hooks/attribution/path_methods.h"
#include "pinion/hooks/attribution/tap.h"

namespace pinion {
namespace {

// Captum's forward hooks and its reduction of their results.
class CaptumHooks final : public TapListener {
 public:
  enum class Saves { kRawAndGoesOnWithClones, kClones };

  // `layers` outlives it.
  CaptumHooks(const std::vector<std::string>& layers, Saves saves)
      : layers_(layers), saves_(saves) {}

  std::vector<at::Tensor> OnTap(std::string_view name, std::vector<at::Tensor> tensors) override {
    if (std::find(layers_.begin(), layers_.end(), name) == layers_.end()) return tensors;
    at::Tensor& saved = saved_[std::string(name)];
    if (saves_ == Saves::kClones) {
      saved = tensors.front().clone();
      return tensors;
    }
    saved = tensors.front();
    if (!saved.requires_grad()) saved.requires_grad_();
    return {saved.clone()};
  }

  // Returns the saved tensors by layer.
  std::vector<at::Tensor> TakeSaved() {
    std::vector<at::Tensor> saved;
    for (const std::string& layer : layers_) saved.push_back(saved_.at(layer));
    saved_.clear();
    return saved;
  }

 private:
  const std::vector<std::string>& layers_;
  const Saves saves_;
  std::map<std::string, at::Tensor> saved_;
};

// Captum's reduction over devices. With one device, cat still copies.
at::Tensor CaptumReduce(const at::Tensor& tensor) { return at::cat({tensor}); }

using Numbers = absl::Span<const double>;

// The hook of LayerIntegratedGradients: replaces the layer's value.
class ReplacingHook final : public TapListener {
 public:
  ReplacingHook(const std::string& layer, at::Tensor value)
      : layer_(layer), value_(std::move(value)) {}

  std::vector<at::Tensor> OnTap(std::string_view name, std::vector<at::Tensor> tensors) override {
    return name == layer_ ? std::vector<at::Tensor>{value_} : tensors;
  }

 private:
  const std::string& layer_;
  const at::Tensor value_;
};

at::Tensor Scaled(const at::Tensor& baseline, const at::Tensor& input, Numbers alphas) {
  std::vector<at::Tensor> steps;
  for (const double alpha : alphas) steps.push_back(baseline + alpha * (input - baseline));
  return at::cat(steps).requires_grad_();
}

at::Tensor Repeated(const at::Tensor& rows, size_t times) {
  return at::cat(std::vector<at::Tensor>(times, rows));
}

at::Tensor SelectedOf(const CaptumPathCall& call, const at::Tensor& rows, TapListener* taps) {
  const TapScope scope(taps);
  return call.target.Select(call.forward({rows}));
}

at::Tensor GradientOf(const at::Tensor& output, const at::Tensor& of) {
  return torch::autograd::grad({output}, {of}, {at::ones_like(output)}).front();
}

// _forward_layer_eval: a concatenated clone.
at::Tensor LayerValue(const CaptumPathCall& call, const at::Tensor& rows) {
  const at::NoGradGuard no_grad;
  const std::vector<std::string> layers = {call.layer};
  CaptumHooks hooks(layers, CaptumHooks::Saves::kClones);
  const TapScope scope(&hooks);
  call.forward({rows});
  return CaptumReduce(hooks.TakeSaved().front());
}

// compute_layer_gradients_and_eval.
struct LayerGradient {
  at::Tensor gradient, value;
};
LayerGradient GradientAndValue(const CaptumPathCall& call, const at::Tensor& rows) {
  const std::vector<std::string> layers = {call.layer};
  CaptumHooks hooks(layers, CaptumHooks::Saves::kRawAndGoesOnWithClones);
  const at::Tensor output = SelectedOf(call, rows, &hooks);
  const at::Tensor raw = hooks.TakeSaved().front();
  at::Tensor value = CaptumReduce(raw);
  return {CaptumReduce(GradientOf(output, raw)), std::move(value)};
}

// Returns rows as [steps, rows of a step, ...].
at::Tensor BySteps(const at::Tensor& rows, int64_t steps) {
  std::vector<int64_t> sizes = rows.sizes().vec();
  sizes.front() /= steps;
  sizes.insert(sizes.begin(), steps);
  return rows.view(sizes);
}

// Returns the sum over the steps of gradient times weight.
at::Tensor WeightedSum(const at::Tensor& gradients, Numbers weights) {
  const auto steps = static_cast<int64_t>(weights.size());
  const at::Tensor on_host =
      at::tensor(std::vector<double>(weights.begin(), weights.end()), at::kDouble);
  const at::Tensor scaled = gradients.contiguous().view({steps, -1}) *
                            on_host.to(at::kFloat).view({steps, 1}).to(gradients.device());
  return BySteps(scaled.view(gradients.sizes()), steps).sum(0);
}

at::Tensor IntegratedGradientsOf(const CaptumPathCall& call, Numbers alphas, Numbers weights) {
  const at::Tensor baseline = at::zeros_like(call.input);
  const at::Tensor scaled = Scaled(baseline, call.input, alphas);
  const at::Tensor gradients = GradientOf(SelectedOf(call, scaled, nullptr), scaled);
  return WeightedSum(gradients, weights) * (call.input - baseline);
}

at::Tensor LayerIntegratedGradientsOf(const CaptumPathCall& call, const at::Tensor& at_input,
                                      const at::Tensor& at_baseline, Numbers alphas,
                                      Numbers weights) {
  const at::Tensor scaled = Scaled(at_baseline, at_input, alphas);
  ReplacingHook hook(call.layer, scaled);
  const at::Tensor rows = Repeated(call.input, alphas.size());
  const at::Tensor gradients = GradientOf(SelectedOf(call, rows, &hook), scaled);
  return WeightedSum(gradients, weights) * (at_input - at_baseline);
}

at::Tensor LayerConductanceOf(const CaptumPathCall& call, Numbers alphas) {
  const at::Tensor scaled = Scaled(at::zeros_like(call.input), call.input, alphas);
  const LayerGradient layer = GradientAndValue(call, scaled);
  const int64_t examples = call.input.size(0);
  const int64_t rows = layer.value.size(0) - examples;
  const at::Tensor differences =
      layer.value.narrow(0, examples, rows) - layer.value.narrow(0, 0, rows);
  const at::Tensor products = differences * layer.gradient.narrow(0, 0, rows);
  return BySteps(products, rows / examples).sum(0);
}

// _batch_attribution: `attribute` for some steps at a time, summed on the device.
using Attribute = std::function<at::Tensor(Numbers alphas, Numbers weights)>;
at::Tensor InBatches(const CaptumPathCall& call, bool includes_endpoint,
                     const Attribute& attribute) {
  const int64_t overlap = includes_endpoint ? 1 : 0;
  const PathPoints points = PointsOf(Quadrature::kGaussLegendre, call.n_steps + overlap);
  const auto all = static_cast<int64_t>(points.alphas.size());
  const int64_t least = overlap + 1;
  const int64_t most = call.internal_batch_size == 0
                           ? all
                           : std::max(least, call.internal_batch_size / call.input.size(0));
  at::Tensor total;
  for (int64_t first = 0; first + overlap < all;) {
    const int64_t count = std::min(most, all - first);
    const auto of = [&](const std::vector<double>& numbers) {
      return absl::MakeConstSpan(numbers).subspan(static_cast<size_t>(first),
                                                  static_cast<size_t>(count));
    };
    const at::Tensor current = attribute(of(points.alphas), of(points.weights));
    total = total.defined() ? total + current.detach() : current;
    first += count - overlap;
  }
  return total;
}

}  // namespace

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

at::Tensor CaptumPath(PathMethod method, const CaptumPathCall& call) {
  const at::AutoGradMode with_grad(true);
  switch (method) {
    case PathMethod::kIntegratedGradients:
      return InBatches(call, false, [&](Numbers alphas, Numbers weights) {
        return IntegratedGradientsOf(call, alphas, weights);
      });
    case PathMethod::kLayerIntegratedGradients: {
      const at::Tensor at_input = LayerValue(call, call.input);
      const at::Tensor at_baseline = LayerValue(call, at::zeros_like(call.input));
      return InBatches(call, false, [&](Numbers alphas, Numbers weights) {
        return LayerIntegratedGradientsOf(call, at_input, at_baseline, alphas, weights);
      });
    }
    case PathMethod::kLayerConductance:
      return InBatches(call, true,
                       [&](Numbers alphas, Numbers) { return LayerConductanceOf(call, alphas); });
  }
  return {};
}

}  // namespace pinion
