// A module whose saved tensors stay on the device, around one that has no parameters by which a
// scope could know it (module_heads.h), or one that is no head by its name.
//
//   torch::nn::Sequential model(torch::nn::Linear(8, 8),
//                               pinion::nn::NoOffload(torch::nn::GELU()),
//                               torch::nn::Linear(8, 1));
//
// It takes one tensor and returns one, as the modules of a Sequential do, and may be around a
// Sequential. The parameters of the module inside are its own, by the path "wrapped". A module that
// takes more opens a NoOffloadScope in its forward.
//
// Thread safety: that of the module inside.

#ifndef PINION_HOOKS_ACTIVATIONS_NO_OFFLOAD_MODULE_H_
#define PINION_HOOKS_ACTIVATIONS_NO_OFFLOAD_MODULE_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <utility>

#include "pinion/hooks/activations/offload_session.h"

namespace pinion::nn {

template <typename Wrapped>
class NoOffloadImpl : public torch::nn::Module {
 public:
  explicit NoOffloadImpl(std::shared_ptr<Wrapped> wrapped)
      : torch::nn::Module("pinion::nn::NoOffload"),
        wrapped_(register_module("wrapped", std::move(wrapped))) {}

  at::Tensor forward(const at::Tensor& input) {
    const NoOffloadScope stays;
    return wrapped_->forward(input);
  }

 private:
  const std::shared_ptr<Wrapped> wrapped_;
};

// Of a module holder, torch::nn::GELU for example.
template <typename Holder>
class NoOffload : public torch::nn::ModuleHolder<NoOffloadImpl<typename Holder::ContainedType>> {
  using Impl = NoOffloadImpl<typename Holder::ContainedType>;

 public:
  explicit NoOffload(const Holder& wrapped)
      : torch::nn::ModuleHolder<Impl>(std::make_shared<Impl>(wrapped.ptr())) {}
};

}  // namespace pinion::nn

#endif  // PINION_HOOKS_ACTIVATIONS_NO_OFFLOAD_MODULE_H_
