// Training steps for packers of saved tensors, and the effect schedules that they must pass.

#ifndef PINION_TESTS_BENCH_PEERS_PEER_STEPS_H_
#define PINION_TESTS_BENCH_PEERS_PEER_STEPS_H_

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <c10/core/Device.h>

#include <memory>
#include <utility>
#include <vector>

#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/tests/hooks/support/test_net.h"

namespace pinion::testing {

class ConvNet {
 public:
  explicit ConvNet(c10::Device device) {
    SeedGenerators();
    for (const std::vector<int64_t>& sizes :
         {std::vector<int64_t>{8, 3, 3, 3}, {8, 8, 3, 3}, {10, 8 * 16 * 16}}) {
      parameters_.push_back((at::randn(sizes) * 0.1).to(device).requires_grad_(true));
    }
    input_ = at::randn({4, 3, 16, 16}).to(device);
  }

  at::Tensor Loss() const {
    const auto convolve = [this](const at::Tensor& x, int layer) {
      return at::relu(at::conv2d(x, parameters_[layer], /*bias=*/{}, /*stride=*/1, /*padding=*/1));
    };
    return at::linear(convolve(convolve(input_, 0), 1).flatten(1), parameters_[2]).square().mean();
  }

  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  const at::Tensor& input() const { return input_; }

  // Returns the gradients on the CPU and clears them.
  std::vector<at::Tensor> TakeGradients() const {
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& parameter : parameters_) {
      gradients.push_back(parameter.grad().cpu());
      parameter.mutable_grad().reset();
    }
    return gradients;
  }

 private:
  std::vector<at::Tensor> parameters_;
  at::Tensor input_;
};

// Runs a step of `net` with its forward in a scope of `packer`; null packs nothing.
inline Gradients TrainStepWith(const TestNet& net, std::shared_ptr<SavedTensorPacker> packer) {
  SeedGenerators();
  at::Tensor loss;
  {
    const SavedTensorScope scope(std::move(packer));
    loss = net.Loss();
  }
  loss.backward();
  return TakeGradients(net, loss);
}

}  // namespace pinion::testing

#endif  // PINION_TESTS_BENCH_PEERS_PEER_STEPS_H_
