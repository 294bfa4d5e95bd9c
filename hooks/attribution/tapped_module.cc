#include "pinion/hooks/attribution/tapped_module.h"

#include <cstddef>

#include "pinion/hooks/attribution/tap.h"

namespace pinion {

nn::TappedImpl::TappedImpl(std::string name, torch::nn::AnyModule module)
    : torch::nn::Module("pinion::nn::Tapped"), name_(std::move(name)), module_(std::move(module)) {
  register_module("module", module_.ptr());
}

at::Tensor nn::TappedImpl::forward(const at::Tensor& input) {
  at::Tensor tapped = Tap(name_ + ".input", input);
  return Tap(name_, module_.forward<at::Tensor>(std::move(tapped)));
}

std::shared_ptr<torch::nn::Module> nn::TappedImpl::clone(
    const std::optional<c10::Device>& device) const {
  return std::make_shared<TappedImpl>(name_, module_.clone(device));
}

SequentialTaps::SequentialTaps(torch::nn::Sequential model, const std::string& prefix)
    : model_(std::move(model)), children_(model_->begin(), model_->end()) {
  const auto names = model_->named_children();
  for (size_t i = 0; i < children_.size(); ++i) {
    *(model_->begin() + static_cast<std::ptrdiff_t>(i)) =
        torch::nn::AnyModule(nn::Tapped(prefix + names[i].key(), children_[i]));
  }
}

SequentialTaps::~SequentialTaps() {
  for (size_t i = 0; i < children_.size(); ++i) {
    *(model_->begin() + static_cast<std::ptrdiff_t>(i)) = std::move(children_[i]);
  }
}

}  // namespace pinion
