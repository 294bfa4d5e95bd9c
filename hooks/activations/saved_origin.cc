#include "pinion/hooks/activations/saved_origin.h"

#include <c10/util/Type.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

namespace pinion {
namespace {

// Does not call grad_fn(), which takes a lock and may recreate a view's node.
const std::type_info* TypeOfMaker(const at::Tensor& tensor) {
  const torch::autograd::Node* const node = torch::autograd::impl::grad_fn_unsafe(tensor);
  return node == nullptr ? nullptr : &typeid(*node);
}

}  // namespace

SavedOrigin::SavedOrigin(const at::Tensor& tensor, const NodeId& saver)
    : view_(tensor),
      made_by_(TypeOfMaker(tensor)),
      node_(saver.sequence == 0 ? 0 : saver.sequence - 1) {}

std::string SavedOrigin::MadeBy() const {
  if (made_by_ == nullptr) return "";
  const std::string name = c10::demangle(made_by_->name());
  const std::string prefix = "torch::autograd::generated::";
  return name.starts_with(prefix) ? name.substr(prefix.size()) : name;
}

}  // namespace pinion
