#include "pinion/hooks/attribution/path_inputs.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <utility>

namespace pinion {
namespace {

// Returns a copy, which a forward function may change in place.
at::Tensor RepeatRows(const at::Tensor& rows, int64_t times) {
  std::vector<int64_t> repeats(static_cast<size_t>(rows.dim()), 1);
  repeats.front() = times;
  return rows.repeat(repeats);
}

}  // namespace

at::Tensor PointsBetween(const at::Tensor& baseline, const at::Tensor& difference,
                         absl::Span<const double> alphas) {
  std::vector<int64_t> sizes = difference.sizes().vec();
  const int64_t per_step = sizes.front();
  sizes.front() *= static_cast<int64_t>(alphas.size());
  at::Tensor points = at::empty(sizes, difference.options());
  for (size_t step = 0; step < alphas.size(); ++step) {
    points.narrow(0, static_cast<int64_t>(step) * per_step, per_step)
        .copy_(baseline + alphas[step] * difference);
  }
  return points;
}

void CheckInputs(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& additional) {
  TORCH_CHECK(!inputs.empty(), "there is no input to attribute to");
  for (const std::vector<at::Tensor>* tensors : {&inputs, &additional}) {
    for (const at::Tensor& tensor : *tensors) {
      TORCH_CHECK(tensor.defined(), "an input is an undefined tensor: give one that has examples");
      TORCH_CHECK(tensor.dim() > 0 && tensor.size(0) == inputs.front().size(0), "an input of ",
                  tensor.sizes(), " beside a first one of ", inputs.front().sizes(),
                  ": the first dimension of each counts the examples");
    }
  }
}

PathInputs::PathInputs(std::vector<at::Tensor> inputs, std::vector<at::Tensor> baselines,
                       std::vector<at::Tensor> additional)
    : inputs_(std::move(inputs)),
      baselines_(std::move(baselines)),
      additional_(std::move(additional)) {
  CheckInputs(inputs_, additional_);
  if (baselines_.empty()) {
    for (const at::Tensor& input : inputs_) {
      baselines_.push_back(at::zeros({}, input.options().requires_grad(false)));
    }
  }
  TORCH_CHECK(baselines_.size() == inputs_.size(), "there are ", baselines_.size(),
              " baselines for ", inputs_.size(), " inputs: give one each, or none");
  for (size_t i = 0; i < inputs_.size(); ++i) {
    at::Tensor& baseline = baselines_[i];
    std::vector<int64_t> one = inputs_[i].sizes().vec();
    one.front() = 1;
    TORCH_CHECK(baseline.dim() == 0 || baseline.sizes() == inputs_[i].sizes() ||
                    baseline.sizes() == at::IntArrayRef(one),
                "a baseline of ", baseline.sizes(), " for an input of ", inputs_[i].sizes(),
                ": it has the input's sizes, or 1 example, or no dimension");
    TORCH_CHECK(baseline.device() == inputs_[i].device(), "a baseline on ", baseline.device(),
                " for an input on ", inputs_[i].device(), ": put both on one device");
    baseline = baseline.detach().expand(inputs_[i].sizes());
  }
}

at::Tensor PathInputs::Input(const PassRows& rows, size_t input) const {
  return inputs_[input].narrow(0, rows.first_example, rows.examples);
}

at::Tensor PathInputs::Baseline(const PassRows& rows, size_t input) const {
  return baselines_[input].narrow(0, rows.first_example, rows.examples);
}

at::Tensor PathInputs::Difference(const PassRows& rows, size_t input) const {
  return Input(rows, input) - Baseline(rows, input);
}

void PathInputs::AppendAdditional(const PassRows& rows, std::vector<at::Tensor>& to) const {
  for (const at::Tensor& tensor : additional_) {
    to.push_back(RepeatRows(tensor.narrow(0, rows.first_example, rows.examples), rows.steps));
  }
}

std::vector<at::Tensor> PathInputs::Between(const PassRows& rows,
                                            absl::Span<const double> alphas) const {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> all;
  for (size_t i = 0; i < inputs_.size(); ++i) {
    TORCH_CHECK(inputs_[i].is_floating_point() || inputs_[i].is_complex(), "input ", i, " is of ",
                inputs_[i].scalar_type(),
                ", between whose values there is no path: attribute to a layer behind it, with "
                "LayerIntegratedGradients");
    all.push_back(PointsBetween(
        Baseline(rows, i), Difference(rows, i),
        alphas.subspan(static_cast<size_t>(rows.first_step), static_cast<size_t>(rows.steps))));
  }
  AppendAdditional(rows, all);
  return all;
}

std::vector<at::Tensor> PathInputs::AtInputs(const PassRows& rows) const {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> all;
  for (size_t i = 0; i < inputs_.size(); ++i) all.push_back(RepeatRows(Input(rows, i), rows.steps));
  AppendAdditional(rows, all);
  return all;
}

std::vector<at::Tensor> PathInputs::AtBaselines(const PassRows& rows) const {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> all;
  for (size_t i = 0; i < inputs_.size(); ++i) {
    all.push_back(RepeatRows(Baseline(rows, i), rows.steps));
  }
  AppendAdditional(rows, all);
  return all;
}

}  // namespace pinion
