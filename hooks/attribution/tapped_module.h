// Puts taps (tap.h) around modules.
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
// A tapped module `name` has two taps: `name` for its output and `name.input` for its input. Either
// is a tensor, a std::vector of tensors, a tuple of two or three, or an LSTM's result. Several
// arguments form one layer. Values of other types pass through without a tap.
//
// A torch::nn::ModuleList does not call its children, and forward is not virtual, so nothing can
// wrap them. ModuleTaps finds children that are Sequentials. For other children, use Tapped or
// write taps in the loop that calls them.
//
// Thread safety: a tapped module is as thread-safe as the wrapped one. Create and destroy
// SequentialTaps and ModuleTaps while no thread runs the model.

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

// The names tapped around a module; each name sees the same tensors. Outermost first.
struct TapNames {
  std::vector<std::string> inputs;
  std::vector<std::string> outputs;  // innermost first
};

class SequentialTaps;

namespace nn {

// A module with its taps. Its parameters' names begin with "module.".
class TappedImpl : public torch::nn::Module {
 public:
  TappedImpl(TapNames names, torch::nn::AnyModule module);
  TappedImpl(const std::string& name, torch::nn::AnyModule module);
  // Wraps a module holder such as torch::nn::Linear, which TORCH_MODULE defines.
  template <typename Contained>
  TappedImpl(const std::string& name, const torch::nn::ModuleHolder<Contained>& holder)
      : TappedImpl(name,
                   holder.is_empty() ? torch::nn::AnyModule() : torch::nn::AnyModule(holder)) {}

  // Calls a module that takes one tensor and returns one.
  at::Tensor forward(const at::Tensor& input);
  // Calls the module with any arguments, up to four; containers call this.
  torch::nn::AnyValue ForwardAny(std::vector<torch::nn::AnyValue> arguments);

  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<c10::Device>& device = std::nullopt) const override;

 private:
  friend class pinion::SequentialTaps;

  const TapNames names_;
  torch::nn::AnyModule module_;
};
TORCH_MODULE(Tapped);

}  // namespace nn

// Puts taps around every child of `model` for the object's lifetime. Taps are named by `prefix` and
// the child's name or index. A prefix like "features." also taps the whole model as "features".
// Parameters keep their names. Several may be on one model, and end in any order. Meanwhile, do not
// clone or change `model`; construct and destroy while no other thread runs it.
class [[nodiscard]] SequentialTaps {
 public:
  [[nodiscard]] explicit SequentialTaps(torch::nn::Sequential model,
                                        const std::string& prefix = "");
  ~SequentialTaps();
  SequentialTaps(const SequentialTaps&) = delete;
  SequentialTaps& operator=(const SequentialTaps&) = delete;

 private:
  torch::nn::Sequential model_;
  std::vector<std::shared_ptr<nn::TappedImpl>> wrappers_;  // by child
};

// Puts SequentialTaps around every Sequential in `model`, or around `model` itself. Names are those
// of model.named_modules(). A shared_ptr must own `model`.
class [[nodiscard]] ModuleTaps {
 public:
  [[nodiscard]] explicit ModuleTaps(const torch::nn::Module& model);

 private:
  std::deque<SequentialTaps> taps_;
};

}  // namespace pinion

// Makes LibTorch's containers call ForwardAny, which takes what the wrapped module takes.
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
