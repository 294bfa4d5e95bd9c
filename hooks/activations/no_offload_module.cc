#include "pinion/hooks/activations/no_offload_module.h"

#include <utility>

#include "pinion/hooks/activations/offload_session.h"

namespace pinion::nn {

NoOffloadImpl::NoOffloadImpl(TensorModule module)
    : torch::nn::Module("pinion::nn::NoOffload"), module_(std::move(module)) {
  register_module("module", module_.ptr());
}

at::Tensor NoOffloadImpl::forward(const at::Tensor& input) {
  const NoOffloadScope stays;
  return module_.forward(input);
}

std::shared_ptr<torch::nn::Module> NoOffloadImpl::clone(
    const std::optional<c10::Device>& device) const {
  auto copy = std::make_shared<NoOffloadImpl>(*this);
  copy->module_ = module_.clone(device);
  copy->replace_module("module", copy->module_.ptr());
  return copy;
}

}  // namespace pinion::nn
