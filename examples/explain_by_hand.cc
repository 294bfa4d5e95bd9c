#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/upsample_bilinear2d.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <cstdint>
#include <numbers>
#include <vector>

#include "pinion/examples/digit_net.h"
#include "pinion/examples/explanation.h"

namespace pinion {
namespace {

// The sum over all pictures of the scores of their classes.
at::Tensor SumOfScores(const at::Tensor& scores, const std::vector<int64_t>& classes) {
  return scores.gather(1, at::tensor(classes, scores.options().dtype(at::kLong)).unsqueeze(1))
      .sum();
}

at::Tensor GradientOf(const at::Tensor& sum, const at::Tensor& input) {
  return torch::autograd::grad({sum}, {input}).front();
}

struct PathSteps {
  std::vector<double> places;   // from 0 to 1
  std::vector<double> weights;  // their sum is 1
};

// Gauss and Legendre's: the roots of the polynomial of degree `steps`, by Newton's method.
PathSteps GaussLegendreSteps(int64_t steps) {
  PathSteps path;
  for (int64_t i = 1; i <= steps; ++i) {
    double x = -std::cos(std::numbers::pi * (i - 0.25) / (steps + 0.5));
    double slope = 0;
    for (int round = 0; round < 8; ++round) {
      double value = x, previous = 1;
      for (int64_t degree = 2; degree <= steps; ++degree) {
        const double next = ((2 * degree - 1) * x * value - (degree - 1) * previous) / degree;
        previous = value;
        value = next;
      }
      slope = steps * (x * value - previous) / (x * x - 1);
      x -= value / slope;
    }
    path.places.push_back((1 + x) / 2);
    path.weights.push_back(1 / ((1 - x * x) * slope * slope));
  }
  return path;
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
  const PathSteps path = GaussLegendreSteps(steps);
  const auto column = [&](const std::vector<double>& numbers) {
    return at::tensor(numbers, explained.pictures.options()).view({-1, 1, 1, 1, 1});
  };
  std::vector<int64_t> classes;
  for (int64_t step = 0; step < steps; ++step) {
    classes.insert(classes.end(), explained.classes.begin(), explained.classes.end());
  }
  const at::Tensor batch =
      (column(path.places) * explained.pictures).flatten(0, 1).requires_grad_();
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
