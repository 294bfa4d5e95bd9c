// Taps (tap.h) around modules.
//
//   torch::nn::Sequential model(pinion::nn::Tapped("fc1", torch::nn::Linear(8, 8)),
//                               torch::nn::ReLU());
//
//   const pinion::SequentialTaps taps(model, "features.");   // or: of a model that is as it is
//   ... layers "features.0", "features.0.input", "features.1", ...
//
// A tapped module `name` has two taps: its output is `name`, its input `name.input`. It takes one
// tensor and returns one.
//
// A torch::nn::ModuleList calls none of its children: who loops over it writes the taps.

#ifndef PINION_HOOKS_ATTRIBUTION_TAPPED_MODULE_H_
#define PINION_HOOKS_ATTRIBUTION_TAPPED_MODULE_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace pinion {
namespace nn {

// A module with its taps. Its parameters' names begin with "module.".
class TappedImpl : public torch::nn::Module {
 public:
  TappedImpl(std::string name, torch::nn::AnyModule module);
  // Of a module holder: torch::nn::Linear, what TORCH_MODULE has made.
  template <typename Contained>
  TappedImpl(std::string name, const torch::nn::ModuleHolder<Contained>& holder)
      : TappedImpl(std::move(name), torch::nn::AnyModule(holder)) {}

  at::Tensor forward(const at::Tensor& input);
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<c10::Device>& device = std::nullopt) const override;

 private:
  std::string name_;
  torch::nn::AnyModule module_;
};
TORCH_MODULE(Tapped);

}  // namespace nn

// While it lives, every child of `model` has taps, called `prefix` and the child's name: the one
// that it was given, or its index. Parameters and their names stay as they are. Do not clone or
// change `model` meanwhile, nor run it on other threads when it begins or ends. A child that takes
// or returns anything but one tensor fails in forward: c10::Error.
class SequentialTaps {
 public:
  explicit SequentialTaps(torch::nn::Sequential model, const std::string& prefix = "");
  ~SequentialTaps();
  SequentialTaps(const SequentialTaps&) = delete;
  SequentialTaps& operator=(const SequentialTaps&) = delete;

 private:
  torch::nn::Sequential model_;
  std::vector<torch::nn::AnyModule> children_;  // as they were
};

}  // namespace pinion

#endif  // PINION_HOOKS_ATTRIBUTION_TAPPED_MODULE_H_
