#include "pinion/hooks/attribution/gradient_shap.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <cmath>
#include <cstddef>
#include <memory>
#include <utility>

#include "pinion/hooks/attribution/layer_pass.h"
#include "pinion/hooks/attribution/passes.h"

namespace pinion {
namespace {

// More than any host's memory has room for.
constexpr int64_t kMostRows = int64_t{1} << 40;

int64_t CountRows(const std::vector<at::Tensor>& inputs, int64_t n_samples) {
  TORCH_CHECK(n_samples > 0, n_samples, " samples: n_samples is at least 1");
  const int64_t examples = inputs.front().size(0);
  TORCH_CHECK(examples == 0 || n_samples <= kMostRows / examples, n_samples, " samples of ",
              examples, " examples are more than 2^40 rows: lower n_samples");
  return n_samples * examples;
}

std::vector<int64_t> NoiseSizes(const at::Tensor& input, int64_t rows) {
  std::vector<int64_t> sizes = input.sizes().vec();
  sizes.front() = rows;
  return sizes;
}

// On CUDA an out-of-range index trips a device assertion, which fails every later call.
void CheckDraws(const ShapDraws& draws, const std::vector<at::Tensor>& inputs, int64_t baselines,
                int64_t n_samples) {
  const int64_t rows = CountRows(inputs, n_samples);
  const auto check = [&](const std::string& name, const at::Tensor& drawn, at::IntArrayRef sizes) {
    TORCH_CHECK(drawn.defined(), "ShapDraws::", name, " is undefined: take DrawShap's, or a tensor",
                " of ", sizes);
    TORCH_CHECK(drawn.is_cpu() && drawn.sizes() == sizes, "ShapDraws::", name, " is of ",
                drawn.sizes(), " on ", drawn.device(), ": it must be of ", sizes,
                " on the CPU, one row for each of ", n_samples, " samples of ",
                inputs.front().size(0), " examples, as DrawShap makes it");
  };
  check("baselines", draws.baselines, {rows});
  check("coefficients", draws.coefficients, {rows});
  TORCH_CHECK(draws.noise.empty() || draws.noise.size() == inputs.size(),
              "ShapDraws has noise for ", draws.noise.size(), " inputs and ", inputs.size(),
              " are given: one each, or none");
  for (size_t i = 0; i < draws.noise.size(); ++i) {
    check(c10::str("noise[", i, "]"), draws.noise[i], NoiseSizes(inputs[i], rows));
  }
  TORCH_CHECK(draws.baselines.scalar_type() == at::kLong, "ShapDraws::baselines is of ",
              draws.baselines.scalar_type(), ": indices are of Long");
  const at::Tensor indices = draws.baselines.contiguous();
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t index = indices.const_data_ptr<int64_t>()[row];
    TORCH_CHECK(0 <= index && index < baselines, "ShapDraws::baselines has ", index, " in row ",
                row, ", and there are ", baselines, " baselines: indices are 0 to ", baselines - 1);
  }
}

// Selects from `drawn` (all rows) the rows of one pass.
at::Tensor OfPass(const at::Tensor& drawn, const PassRows& rows, int64_t examples) {
  std::vector<int64_t> sizes = drawn.sizes().vec();
  sizes.front() = examples;
  sizes.insert(sizes.begin(), drawn.size(0) / examples);
  return drawn.view(sizes)
      .narrow(0, rows.first_step, rows.steps)
      .narrow(1, rows.first_example, rows.examples)
      .flatten(0, 1);
}

// The forward inputs of one pass: noisy inputs, baselines and points in between. Each vector ends
// with the additional inputs.
struct ShapRows {
  std::vector<at::Tensor> inputs, baselines, between;
};

ShapRows RowsOf(const PathInputs& path, const std::vector<at::Tensor>& baselines,
                const ShapDraws& draws, const PassRows& rows) {
  const at::NoGradGuard no_grad;
  ShapRows all;
  all.inputs = path.AtInputs(rows);
  const at::Tensor drawn = OfPass(draws.baselines, rows, path.examples());
  const at::Tensor coefficients = OfPass(draws.coefficients, rows, path.examples());
  for (size_t i = 0; i < path.size(); ++i) {
    at::Tensor& input = all.inputs[i];
    TORCH_CHECK(input.is_floating_point(), "input ", i, " is of ", input.scalar_type(),
                ", between whose values there is no path");
    if (!draws.noise.empty()) {
      input = input + OfPass(draws.noise[i], rows, path.examples()).to(input.options());
    }
    at::Tensor baseline = baselines[i].detach().index_select(0, drawn.to(baselines[i].device()));
    std::vector<int64_t> one_each(static_cast<size_t>(input.dim()), 1);
    one_each.front() = -1;
    const at::Tensor coefficient = coefficients.to(input.options()).view(one_each);
    all.between.push_back(coefficient * input + (1 - coefficient) * baseline);
    all.baselines.push_back(std::move(baseline));
  }
  path.AppendAdditional(rows, all.baselines);
  path.AppendAdditional(rows, all.between);
  return all;
}

// The layers' values at inputs and at baselines.
struct LayerChange {
  PendingLayers at_inputs, at_baselines;
  std::vector<LayerResult> inputs = {}, baselines = {};  // when the pass has arrived
};

at::Tensor TakeValue(std::vector<LayerResult>& layers, LayerPart part) {
  return std::exchange(layers[part.layer].tensors[part.tensor].activation, {});
}

}  // namespace

ShapDraws DrawShap(const std::vector<at::Tensor>& inputs, int64_t baselines,
                   const ShapOptions& options) {
  TORCH_CHECK(std::isfinite(options.stdev) && options.stdev >= 0, "noise of stdev ", options.stdev,
              ": it must be finite and at least 0");
  CheckInputs(inputs, /*additional=*/{});
  TORCH_CHECK(baselines > 0, "a distribution of no baselines: give at least one example");
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(options.seed);
  const int64_t rows = CountRows(inputs, options.n_samples);
  ShapDraws draws;
  draws.baselines = at::randint(baselines, {rows}, generator, at::kLong);
  draws.coefficients = at::rand({rows}, generator, at::kDouble);
  for (const at::Tensor& input : inputs) {
    if (options.stdev == 0) break;
    draws.noise.push_back(at::randn(NoiseSizes(input, rows), generator, at::kDouble) *
                          options.stdev);
  }
  return draws;
}

std::vector<LayerAttribution> LayerGradientShap(AttributionSession& session,
                                                const AttributedForward& forward,
                                                const std::vector<std::string>& layers,
                                                const std::vector<at::Tensor>& inputs,
                                                const std::vector<at::Tensor>& baselines,
                                                const Target& target, const ShapOptions& options) {
  TORCH_CHECK(!baselines.empty() && baselines.front().dim() > 0,
              "there is no distribution of baselines: give one for each input");
  return LayerGradientShap(session, forward, layers, inputs, baselines, target, options,
                           DrawShap(inputs, baselines.front().size(0), options));
}

std::vector<LayerAttribution> LayerGradientShap(AttributionSession& session,
                                                const AttributedForward& forward,
                                                const std::vector<std::string>& layers,
                                                const std::vector<at::Tensor>& inputs,
                                                const std::vector<at::Tensor>& baselines,
                                                const Target& target, const ShapOptions& options,
                                                const ShapDraws& draws) {
  const PathInputs path(inputs, /*baselines=*/{}, options.additional_inputs);
  TORCH_CHECK(baselines.size() == inputs.size(), "there are ", baselines.size(),
              " distributions of baselines for ", inputs.size(), " inputs: give one each");
  for (size_t i = 0; i < inputs.size(); ++i) {
    TORCH_CHECK(baselines[i].dim() == inputs[i].dim() &&
                    baselines[i].sizes().slice(1) == inputs[i].sizes().slice(1) &&
                    baselines[i].size(0) == baselines.front().size(0),
                "baselines of ", baselines[i].sizes(), " for an input of ", inputs[i].sizes(),
                ": they are examples like the input's, as many for each input");
    TORCH_CHECK(baselines[i].device() == inputs[i].device(), "baselines on ", baselines[i].device(),
                " for an input on ", inputs[i].device(), ": put both on one device");
  }
  CheckDraws(draws, inputs, baselines.front().size(0), options.n_samples);
  PassRun run(session, forward, layers, target, {path.examples(), options.n_samples},
              options.device_budget_bytes, options.layers);
  return run.Sum([&](const PassRows& rows) {
    const ShapRows given = RowsOf(path, baselines, draws, rows);
    const std::vector<double> weights(static_cast<size_t>(rows.steps),
                                      1 / static_cast<double>(options.n_samples));
    LayerCallbacks callbacks;
    if (!options.multiply_by_inputs) {
      callbacks.output_function = [&](LayerPart, const at::Tensor& gradient) {
        return SumOverSteps(gradient, rows, weights);
      };
      return run.Gradients(rows, given.between, callbacks);
    }
    const auto change = std::make_shared<LayerChange>(
        LayerChange{run.Values(given.inputs), run.Values(given.baselines)});
    callbacks.on_arrival = [&run, rows, weights, change](LayerPart part, LayerTensor& tensor) {
      const auto add = [&weights](at::Tensor& sum, const std::vector<at::Tensor>& blocks) {
        for (int64_t step = 0; step < blocks[0].size(0); ++step) {
          const at::Tensor change_at = blocks[0].select(0, step) - blocks[1].select(0, step);
          sum.add_(change_at * blocks[2].select(0, step), weights[static_cast<size_t>(step)]);
        }
      };
      run.Add(
          part, rows,
          SumTermsOverSteps({TakeValue(change->inputs, part), TakeValue(change->baselines, part),
                             std::exchange(tensor.gradient, {})},
                            rows, add));
    };
    QueuedPass queued = run.Gradients(rows, given.between, callbacks);
    queued.finish = [change, finish = std::move(queued.finish)] {
      change->inputs = change->at_inputs.Wait();
      change->baselines = change->at_baselines.Wait();
      finish();
    };
    return queued;
  });
}

}  // namespace pinion
