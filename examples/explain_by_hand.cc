#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/upsample_bilinear2d.h>
#include <torch/csrc/autograd/autograd.h>

#include <cstdint>
#include <vector>

#include "pinion/examples/digit_net.h"
#include "pinion/examples/explanation.h"
#include "pinion/hooks/attribution/quadrature.h"

namespace pinion {
namespace {

// Returns the sum of each picture's score of its class.
at::Tensor SumOfScores(const at::Tensor& scores, const std::vector<int64_t>& classes) {
  return scores.gather(1, at::tensor(classes, scores.options().dtype(at::kLong)).unsqueeze(1))
      .sum();
}

at::Tensor GradientOf(const at::Tensor& sum, const at::Tensor& input) {
  return torch::autograd::grad({sum}, {input}).front();
}

at::Tensor GradCam(DigitNet& net, const ExplainedPictures& explained) {
  const at::Tensor block = net->LastBlock(explained.pictures);
  const at::Tensor gradient = GradientOf(SumOfScores(net->Scores(block), explained.classes), block);
  const at::Tensor map =
      (gradient.mean({2, 3}, /*keepdim=*/true) * block).sum(1, /*keepdim=*/true).relu();
  return at::upsample_bilinear2d(map.detach().cpu(), {kDigitNetSide, kDigitNetSide},
                                 /*align_corners=*/false);
}

at::Tensor IntegratedGradientsInOneBatch(DigitNet& net, const ExplainedPictures& explained,
                                         int64_t steps) {
  const PathPoints path = PointsOf(Quadrature::kGaussLegendre, steps);
  const auto column = [&](const std::vector<double>& numbers) {
    return at::tensor(numbers, explained.pictures.options()).view({-1, 1, 1, 1, 1});
  };
  std::vector<int64_t> classes;
  for (int64_t step = 0; step < steps; ++step) {
    classes.insert(classes.end(), explained.classes.begin(), explained.classes.end());
  }
  const at::Tensor batch =
      (column(path.alphas) * explained.pictures).flatten(0, 1).requires_grad_();
  const at::Tensor gradients = GradientOf(SumOfScores(net->forward(batch), classes), batch);
  const at::Tensor mean =
      (column(path.weights) * gradients.unflatten(0, {steps, explained.pictures.size(0)})).sum(0);
  return (explained.pictures * mean).cpu();
}

}  // namespace

Explanation ExplainByHand(DigitNet& net, const ExplainedPictures& explained, int64_t steps) {
  return {GradCam(net, explained), IntegratedGradientsInOneBatch(net, explained, steps)};
}

}  // namespace pinion
