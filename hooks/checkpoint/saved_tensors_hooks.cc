#include "pinion/hooks/checkpoint/saved_tensors_hooks.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/DimVector.h>
#include <c10/util/Exception.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "pinion/hooks/autograd/lent_tensors.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/autograd/scope_mark.h"

namespace pinion {
namespace {

// A nested tensor has no sizes.
at::DimVector SizesOf(const at::Tensor& tensor) {
  return tensor.is_nested() ? at::DimVector() : at::DimVector(tensor.sizes());
}

class UserPackedTensor : public SavedTensor {
 public:
  UserPackedTensor(checkpoint_internal::UnpackPacked unpack, const at::Tensor& tensor)
      : unpack_(std::move(unpack)),
        node_gets_copy_(NodeGetsCopyOf(tensor)),
        type_(tensor.scalar_type()),
        sizes_(SizesOf(tensor)) {}

  at::Tensor Unpack() override {
    const at::Tensor tensor = unpack_();
    TORCH_CHECK(
        tensor.defined(),
        "an unpack function of SavedTensorsHooks has returned no tensor: it must return one "
        "with the content of the tensor that was packed");
    TORCH_CHECK(tensor.scalar_type() == type_ && SizesOf(tensor) == sizes_,
                "an unpack function of SavedTensorsHooks has returned ", tensor.scalar_type(), " ",
                at::IntArrayRef(SizesOf(tensor)), " for ", type_, " ", at::IntArrayRef(sizes_),
                ": it must return a tensor with the content of the tensor that was packed");
    return Lend(tensor, node_gets_copy_);
  }

 private:
  const checkpoint_internal::UnpackPacked unpack_;
  const bool node_gets_copy_;
  const at::ScalarType type_;
  const at::DimVector sizes_;
};

class UserPacker : public SavedTensorPacker {
 public:
  explicit UserPacker(checkpoint_internal::PackWithUnpack pack) : pack_(std::move(pack)) {}

  std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace&) override {
    return std::make_unique<UserPackedTensor>(pack_(tensor), tensor);
  }

 private:
  const checkpoint_internal::PackWithUnpack pack_;
};

}  // namespace

std::shared_ptr<SavedTensorPacker> checkpoint_internal::PackerOf(PackWithUnpack pack) {
  return std::make_shared<UserPacker>(std::move(pack));
}

struct checkpoint_internal::DisabledHooks {
  ScopeMark mark{"DisableSavedTensorsHooks"};
  const std::optional<std::string> outer_message;
  const std::shared_ptr<DisabledHooks> outer;  // null for the outermost
};

namespace {

using checkpoint_internal::DisabledHooks;

thread_local std::shared_ptr<DisabledHooks> t_disabled;  // the innermost

void EnableThoseThatHaveEnded() {
  while (t_disabled != nullptr && t_disabled->mark.HasEnded()) {
    if (t_disabled->outer_message.has_value()) {
      at::SavedTensorDefaultHooks::disable(*t_disabled->outer_message,
                                           /*fail_if_non_empty=*/false);
    } else {
      at::SavedTensorDefaultHooks::enable();
    }
    t_disabled = std::shared_ptr<DisabledHooks>(t_disabled->outer);
  }
}

std::shared_ptr<DisabledHooks> Disable(const std::string& message) {
  EnableThoseThatHaveEnded();
  const bool is_inside_of_hooks =
      CurrentPacker() != nullptr || !at::SavedTensorDefaultHooks::get_tls_state().stack.empty();
  TORCH_CHECK(!is_inside_of_hooks, message);
  t_disabled.reset(
      new DisabledHooks{.outer_message = at::SavedTensorDefaultHooks::get_disabled_error_message(),
                        .outer = t_disabled});
  at::SavedTensorDefaultHooks::disable(message);
  return t_disabled;
}

}  // namespace

DisableSavedTensorsHooks::DisableSavedTensorsHooks(const std::string& message)
    : disabled_(Disable(message)) {}

DisableSavedTensorsHooks::~DisableSavedTensorsHooks() {
  disabled_->mark.End(t_disabled == nullptr ? nullptr : &t_disabled->mark);
  EnableThoseThatHaveEnded();
}

}  // namespace pinion
