// Taps (tap.h) around modules.
//
//   torch::nn::Sequential model(pinion::nn::Tapped("fc1", torch::nn::Linear(8, 8)),
//                               torch::nn::ReLU());
//
//   const pinion::SequentialTaps taps(model, "features.");   // or: of a model that is as it is
//   ... layers "features.0", "features.0.input", "features.1", ..., "features", "features.input"
//
//   const pinion::ModuleTaps taps(*model);                   // of all its Sequentials
//   ... layers "blocks.3.0", "blocks.3", ...
//
// A tapped module `name` has two taps: its output is `name`, its input `name.input`. Either is a
// tensor, several (std::vector), a tuple of two or three, or what an LSTM returns; several
// arguments are one layer together. What is of another type goes through and has no tap.
//
// A torch::nn::ModuleList calls none of its children: a program calls them by their own types, and
// forward is not virtual. Of a list whose children are Sequentials, ModuleTaps finds those; in
// others, children are Tapped ones, or who loops over them writes the taps.
//
// Thread safety: a tapped module is as thread-safe as its own module. SequentialTaps and ModuleTaps
// are made and go while no thread runs the model.

#ifndef PINION_HOOKS_ATTRIBUTION_TAPPED_MODULE_H_
#define PINION_HOOKS_ATTRIBUTION_TAPPED_MODULE_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

namespace pinion {

// What is tapped around a module: each name sees the same tensors, the outermost first.
struct TapNames {
  std::vector<std::string> inputs;
  std::vector<std::string> outputs;  // the innermost first
};

namespace nn {

// A module with its taps. Its parameters' names begin with "module.".
class TappedImpl : public torch::nn::Module {
 public:
  TappedImpl(TapNames names, torch::nn::AnyModule module);
  TappedImpl(const std::string& name, torch::nn::AnyModule module);
  // Of a module holder: torch::nn::Linear, what TORCH_MODULE has made.
  template <typename Contained>
  TappedImpl(const std::string& name, const torch::nn::ModuleHolder<Contained>& holder)
      : TappedImpl(name, torch::nn::AnyModule(holder)) {}

  // Of a module that takes one tensor and returns one.
  at::Tensor forward(const at::Tensor& input);
  // What a container calls: takes and returns what the module does, up to four arguments.
  torch::nn::AnyValue ForwardAny(std::vector<torch::nn::AnyValue> arguments);

  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<c10::Device>& device = std::nullopt) const override;

 private:
  const TapNames names_;
  torch::nn::AnyModule module_;
};
TORCH_MODULE(Tapped);

}  // namespace nn

// While it lives, every child of `model` has taps, called `prefix` and the child's name: the one
// that it was given, or its index. Where `prefix` is a name and a dot, all of the model has taps by
// that name. Parameters and their names stay as they are. Do not clone or change `model` meanwhile,
// nor run it on other threads when it begins or ends.
class [[nodiscard]] SequentialTaps {
 public:
  [[nodiscard]] explicit SequentialTaps(torch::nn::Sequential model,
                                        const std::string& prefix = "");
  ~SequentialTaps();
  SequentialTaps(const SequentialTaps&) = delete;
  SequentialTaps& operator=(const SequentialTaps&) = delete;

 private:
  torch::nn::Sequential model_;
  std::vector<torch::nn::AnyModule> children_;  // as they were
};

// SequentialTaps of every Sequential that is in `model`, or is it, called as
// model.named_modules(name) calls them. A shared_ptr owns `model`.
class [[nodiscard]] ModuleTaps {
 public:
  [[nodiscard]] explicit ModuleTaps(const torch::nn::Module& model, const std::string& name = "");

 private:
  std::deque<SequentialTaps> taps_;
};

}  // namespace pinion

// How LibTorch's containers call a module whose forward takes one tensor: this one takes whatever
// its own module does.
template <>
struct torch::nn::AnyModuleHolder<pinion::nn::TappedImpl, const at::Tensor&> final
    : torch::nn::AnyModulePlaceholder {
  explicit AnyModuleHolder(std::shared_ptr<pinion::nn::TappedImpl>&& tapped)
      : AnyModulePlaceholder(typeid(pinion::nn::TappedImpl)), module(std::move(tapped)) {}

  AnyValue forward(std::vector<AnyValue>&& arguments) override {
    return module->ForwardAny(std::move(arguments));
  }
  std::shared_ptr<Module> ptr() override { return module; }
  std::unique_ptr<AnyModulePlaceholder> copy() const override {
    return std::make_unique<AnyModuleHolder>(*this);
  }
  std::unique_ptr<AnyModulePlaceholder> clone_module(
      std::optional<c10::Device> device) const override {
    return std::make_unique<AnyModuleHolder>(
        std::dynamic_pointer_cast<pinion::nn::TappedImpl>(module->clone(device)));
  }

  std::shared_ptr<pinion::nn::TappedImpl> module;
};

#endif  // PINION_HOOKS_ATTRIBUTION_TAPPED_MODULE_H_
