#include "pinion/examples/fused_adamw.h"

#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "pinion/device/allocation_label.h"

namespace pinion {
namespace {

constexpr double kLearningRate = 1e-3;
constexpr int64_t kLearningRateWarmup = 20;
constexpr double kBeta1 = 0.9, kBeta2 = 0.99, kWeightDecay = 0.1, kEpsilon = 1e-8;

}  // namespace

FusedAdamW::FusedAdamW(std::vector<at::Tensor> parameters) : parameters_(std::move(parameters)) {
  const AllocationLabel label("optimizer state");
  for (const at::Tensor& parameter : parameters_) {
    means_.push_back(at::zeros_like(parameter));
    squares_.push_back(at::zeros_like(parameter));
  }
}

void FusedAdamW::Step(const std::vector<at::Tensor>& gradients, int64_t step) {
  const c10::NoGradGuard no_grad;
  const AllocationLabel label("optimizer state");
  const double warmup = std::min(1.0, static_cast<double>(step) / kLearningRateWarmup);
  const std::vector<at::Tensor> steps(
      parameters_.size(),
      at::scalar_tensor(static_cast<float>(step), parameters_[0].options().dtype(at::kFloat)));
  at::_fused_adamw_(parameters_, gradients, means_, squares_, /*max_exp_avg_sqs=*/{}, steps,
                    warmup * kLearningRate, kBeta1, kBeta2, kWeightDecay, kEpsilon,
                    /*amsgrad=*/false, /*maximize=*/false);
}

}  // namespace pinion
