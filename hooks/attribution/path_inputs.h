// What a forward function is given along a path from baselines to inputs, by passes.
//
//   const PathInputs path(inputs, options.baselines, options.additional_inputs);
//   forward(path.Between(rows, alphas));       // step by step: all examples of a step together
//
// Thread safety: a value.
// Errors: c10::Error for inputs, baselines and further inputs that do not fit each other.

#ifndef PINION_HOOKS_ATTRIBUTION_PATH_INPUTS_H_
#define PINION_HOOKS_ATTRIBUTION_PATH_INPUTS_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "pinion/hooks/attribution/pass_budget.h"

namespace pinion {

// `steps` points between two tensors behind each other on dimension 0, at these alphas.
at::Tensor PointsBetween(const at::Tensor& baseline, const at::Tensor& difference,
                         absl::Span<const double> alphas);

class PathInputs {
 public:
  // Empty baselines are zeros. One for all examples has no dimension, or a first dimension of 1.
  PathInputs(std::vector<at::Tensor> inputs, std::vector<at::Tensor> baselines,
             std::vector<at::Tensor> additional);

  int64_t examples() const { return inputs_.front().size(0); }
  size_t size() const { return inputs_.size(); }

  // For a forward function: inputs at the rows' steps, which `alphas` of all steps say, and the
  // additional ones behind them.
  std::vector<at::Tensor> Between(const PassRows& rows, absl::Span<const double> alphas) const;
  // The same where each step is at the inputs, or at the baselines.
  std::vector<at::Tensor> AtInputs(const PassRows& rows) const;
  std::vector<at::Tensor> AtBaselines(const PassRows& rows) const;

  // Copies of the additional inputs, which a forward function may change in place.
  void AppendAdditional(const PassRows& rows, std::vector<at::Tensor>& to) const;

  // Of one input, for the rows' examples. Within at::NoGradGuard.
  at::Tensor Difference(const PassRows& rows, size_t input) const;

 private:
  at::Tensor Input(const PassRows& rows, size_t input) const;
  at::Tensor Baseline(const PassRows& rows, size_t input) const;
  std::vector<at::Tensor> inputs_;
  std::vector<at::Tensor> baselines_;
  std::vector<at::Tensor> additional_;
};

}  // namespace pinion

#endif  // PINION_HOOKS_ATTRIBUTION_PATH_INPUTS_H_
