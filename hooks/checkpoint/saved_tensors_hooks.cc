#include "pinion/hooks/checkpoint/saved_tensors_hooks.h"

#include <ATen/SavedTensorHooks.h>
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

class UserPackedTensor : public SavedTensor {
 public:
  UserPackedTensor(checkpoint_internal::UnpackPacked unpack, bool node_gets_copy)
      : unpack_(std::move(unpack)), node_gets_copy_(node_gets_copy) {}

  at::Tensor Unpack() override {
    const at::Tensor tensor = unpack_();
    TORCH_CHECK(
        tensor.defined(),
        "an unpack function of SavedTensorsHooks has returned no tensor: it must return one "
        "with the content of the tensor that was packed");
    return Lend(tensor, node_gets_copy_);
  }

 private:
  const checkpoint_internal::UnpackPacked unpack_;
  const bool node_gets_copy_;
};

class UserPacker : public SavedTensorPacker {
 public:
  explicit UserPacker(checkpoint_internal::PackWithUnpack pack) : pack_(std::move(pack)) {}

  std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace&) override {
    return std::make_unique<UserPackedTensor>(pack_(tensor), NodeGetsCopyOf(tensor));
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
