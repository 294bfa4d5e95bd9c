// Holds any module that takes one tensor and returns one, as the modules of a Sequential do.
//
//   TensorModule module = torch::nn::GELU();
//   at::Tensor y = module.forward(x);
//
// Thread safety: that of the module.
// Ownership: shares ownership of the module.

#ifndef PINION_HOOKS_AUTOGRAD_TENSOR_MODULE_H_
#define PINION_HOOKS_AUTOGRAD_TENSOR_MODULE_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <optional>

namespace pinion {

class TensorModule {
 public:
  // Takes a module holder: torch::nn::Linear, torch::nn::Sequential, or a TORCH_MODULE. Implicit,
  // so that wrapping modules accept holders. Throws c10::Error for an empty holder.
  template <typename Contained>
  TensorModule(const torch::nn::ModuleHolder<Contained>& holder)  // NOLINT(*-explicit-*)
      : module_(NotEmpty(holder)),
        forward_([](torch::nn::Module& module, const at::Tensor& x) -> at::Tensor {
          return dynamic_cast<Contained&>(module).forward(x);
        }) {}

  const std::shared_ptr<torch::nn::Module>& ptr() const { return module_; }
  at::Tensor forward(const at::Tensor& x) const { return forward_(*module_, x); }

  // Returns a TensorModule over a copy of the module. Throws c10::Error if the module is no
  // torch::nn::Cloneable.
  TensorModule clone(const std::optional<c10::Device>& device) const {
    TensorModule copy = *this;
    copy.module_ = module_->clone(device);
    return copy;
  }

 private:
  template <typename Contained>
  static std::shared_ptr<torch::nn::Module> NotEmpty(
      const torch::nn::ModuleHolder<Contained>& holder) {
    TORCH_CHECK(!holder.is_empty(), "a wrapper of an empty module holder (",
                c10::demangle_type<Contained>(), "): construct the module without nullptr");
    return holder.ptr();
  }

  std::shared_ptr<torch::nn::Module> module_;
  at::Tensor (*forward_)(torch::nn::Module& module, const at::Tensor& x);
};

}  // namespace pinion

#endif  // PINION_HOOKS_AUTOGRAD_TENSOR_MODULE_H_
