#include "pinion/hooks/activations/saved_origin.h"

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/StringUtil.h>
#include <c10/util/Type.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

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

std::string SavedView::Describe() const {
  return c10::str(c10::typeMetaToScalarType(dtype_), " ", c10::IntArrayRef(sizes_));
}

at::Tensor SavedView::Over(c10::Storage storage, int64_t shift_bytes, c10::DispatchKeySet keys,
                           const c10::VariableVersion* version) const {
  keys = keys.add(
      c10::computeDispatchKey(c10::typeMetaToScalarType(dtype_), c10::kStrided, storage.device()));
  auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(storage), keys, dtype_);
  impl->set_sizes_and_strides(
      sizes_, strides_, (offset_bytes_ + shift_bytes) / static_cast<int64_t>(dtype_.itemsize()));
  if (version != nullptr) {
    impl->set_version_counter(*version);
  } else if (!impl->version_counter().enabled()) {  // created in inference mode
    impl->set_version_counter(c10::VariableVersion(/*version=*/0));
  }
  return at::Tensor(std::move(impl));
}

}  // namespace pinion
