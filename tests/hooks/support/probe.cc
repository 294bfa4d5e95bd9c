#include "pinion/tests/hooks/support/probe.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/add.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/remainder.h>
#include <c10/core/GradMode.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <utility>

#include "pinion/hooks/autograd/libtorch_compat.h"

namespace pinion::testing {
namespace {

// Reads as LibTorch's own nodes do.
class ProbeNode : public torch::autograd::TraceableFunction {
 public:
  ProbeNode(const std::vector<at::Tensor>& saved, ProbeBackward backward)
      : backward_(std::move(backward)) {
    for (const at::Tensor& tensor : saved) saved_.emplace_back(tensor, /*is_output=*/false);
  }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    return {backward_(grads[0], [this] {
      std::vector<at::Tensor> tensors;
      for (const auto& saved : saved_) tensors.push_back(saved.unpack(getptr()));
      return tensors;
    })};
  }

  void release_variables() override {
    for (auto& saved : saved_) saved.reset_data();
  }

 private:
  const ProbeBackward backward_;
  std::vector<torch::autograd::SavedVariable> saved_;
};

}  // namespace

at::Tensor Probe(const at::Tensor& carrier, const std::vector<at::Tensor>& saved,
                 ProbeBackward backward, const std::function<at::Tensor()>& compute) {
  const NodePtr node = MakeNode<ProbeNode>(saved, std::move(backward));
  node->set_next_edges(torch::autograd::collect_next_edges(carrier));
  at::Tensor output;
  if (compute != nullptr) {
    const at::AutoDispatchBelowADInplaceOrView below;
    output = compute();
  } else {
    const c10::NoGradGuard no_grad;
    output = carrier.clone();
  }
  torch::autograd::set_history(output, node);
  return output;
}

at::Tensor Observe(const at::Tensor& carrier, const std::vector<at::Tensor>& saved,
                   std::vector<at::Tensor>* seen) {
  return Probe(carrier, saved, [seen](const at::Tensor& grad, const UnpackSaved& unpack) {
    *seen = unpack();
    return grad;
  });
}

at::Tensor ActivationValues(at::IntArrayRef sizes, int first) {
  const c10::NoGradGuard no_grad;
  return at::remainder(at::arange(first, first + c10::multiply_integers(sizes), at::kFloat), 251)
      .view(sizes);
}

at::Tensor Activation(const at::Tensor& carrier, at::IntArrayRef sizes, int first) {
  const at::Tensor values = ActivationValues(sizes, first).to(carrier.device());
  return at::add(values, at::mul(carrier.view({-1})[0], 0));
}

}  // namespace pinion::testing
