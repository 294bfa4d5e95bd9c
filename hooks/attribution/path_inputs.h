// Builds the inputs of a forward function along the path from baselines to inputs, pass by pass.
//
//   const PathInputs path(inputs, options.baselines, options.additional_inputs);
//   forward(path.Between(rows, alphas));       // step by step: all examples of a step together
//
// Thread safety: a value.
// Errors: c10::Error if inputs, baselines and additional inputs do not fit.

#ifndef PINION_HOOKS_ATTRIBUTION_PATH_INPUTS_H_
#define PINION_HOOKS_ATTRIBUTION_PATH_INPUTS_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "pinion/hooks/attribution/pass_budget.h"

namespace pinion {

// Returns baseline + alpha * difference for each alpha, concatenated on dimension 0.
at::Tensor PointsBetween(const at::Tensor& baseline, const at::Tensor& difference,
                         absl::Span<const double> alphas);

// Throws c10::Error unless there is an input, and all tensors have as many examples as the first.
void CheckInputs(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& additional);

class PathInputs {
 public:
  // Empty baselines mean zeros. One for all examples has no dimensions, or a first dimension of 1.
  PathInputs(std::vector<at::Tensor> inputs, std::vector<at::Tensor> baselines,
             std::vector<at::Tensor> additional);

  int64_t examples() const { return inputs_.front().size(0); }
  size_t size() const { return inputs_.size(); }

  // Returns the inputs at the steps of `rows`, then the additional inputs. `alphas` has all steps.
  std::vector<at::Tensor> Between(const PassRows& rows, absl::Span<const double> alphas) const;
  // Return the same with every step at the inputs, or at the baselines.
  std::vector<at::Tensor> AtInputs(const PassRows& rows) const;
  std::vector<at::Tensor> AtBaselines(const PassRows& rows) const;

  // Appends copies of the additional inputs, which a forward function may change in place.
  void AppendAdditional(const PassRows& rows, std::vector<at::Tensor>& to) const;

  // Returns input minus baseline for the examples of `rows`. Call it under at::NoGradGuard.
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
