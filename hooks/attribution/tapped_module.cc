#include "pinion/hooks/attribution/tapped_module.h"

#include <c10/util/Exception.h>

#include <cstddef>
#include <set>
#include <tuple>

#include "pinion/allocator/base/check.h"
#include "pinion/hooks/attribution/tap.h"

namespace pinion {
namespace {

using at::Tensor;
using torch::nn::AnyValue;

// Returns the tensors in a value of a tapped type; empty for another type.
std::vector<Tensor*> TensorsIn(AnyValue& value) {
  if (auto* one = value.try_get<Tensor>()) return {one};
  if (auto* several = value.try_get<std::vector<Tensor>>()) {
    std::vector<Tensor*> tensors;
    for (Tensor& tensor : *several) tensors.push_back(&tensor);
    return tensors;
  }
  if (auto* two = value.try_get<std::tuple<Tensor, Tensor>>()) {
    return {&std::get<0>(*two), &std::get<1>(*two)};
  }
  if (auto* three = value.try_get<std::tuple<Tensor, Tensor, Tensor>>()) {
    return {&std::get<0>(*three), &std::get<1>(*three), &std::get<2>(*three)};
  }
  if (auto* lstm = value.try_get<std::tuple<Tensor, std::tuple<Tensor, Tensor>>>()) {
    auto& [output, state] = *lstm;
    return {&output, &std::get<0>(state), &std::get<1>(state)};
  }
  return {};
}

void TapAll(const std::vector<std::string>& names, const std::vector<Tensor*>& tensors) {
  for (const std::string& name : names) {
    std::vector<Tensor> values;
    for (Tensor* tensor : tensors) values.push_back(std::move(*tensor));
    values = Tap(name, std::move(values));
    for (size_t i = 0; i < tensors.size(); ++i) *tensors[i] = std::move(values[i]);
  }
}

AnyValue Call(torch::nn::AnyModule& module, std::vector<AnyValue> values) {
  switch (values.size()) {
    case 0:
      return module.any_forward();
    case 1:
      return module.any_forward(std::move(values[0]));
    case 2:
      return module.any_forward(std::move(values[0]), std::move(values[1]));
    case 3:
      return module.any_forward(std::move(values[0]), std::move(values[1]), std::move(values[2]));
    case 4:
      return module.any_forward(std::move(values[0]), std::move(values[1]), std::move(values[2]),
                                std::move(values[3]));
    default:
      TORCH_CHECK(false, "a tapped module was given ", values.size(),
                  " arguments, and four are the most: write the taps in the model (tap.h)");
  }
}

}  // namespace

nn::TappedImpl::TappedImpl(TapNames names, torch::nn::AnyModule module)
    : torch::nn::Module("pinion::nn::Tapped"),
      names_(std::move(names)),
      module_(std::move(module)) {
  TORCH_CHECK(!module_.is_empty(), "nn::Tapped \"", names_.outputs.empty() ? "" : names_.outputs[0],
              "\" of an empty module holder: construct the module without nullptr");
  register_module("module", module_.ptr());
}

nn::TappedImpl::TappedImpl(const std::string& name, torch::nn::AnyModule module)
    : TappedImpl({{name + ".input"}, {name}}, std::move(module)) {}

Tensor nn::TappedImpl::forward(const Tensor& input) {
  std::vector<AnyValue> arguments;
  arguments.emplace_back(input);
  return ForwardAny(std::move(arguments)).get<Tensor>();
}

AnyValue nn::TappedImpl::ForwardAny(std::vector<AnyValue> arguments) {
  std::vector<Tensor*> inputs;
  for (AnyValue& argument : arguments) {
    const std::vector<Tensor*> tensors = TensorsIn(argument);
    inputs.insert(inputs.end(), tensors.begin(), tensors.end());
  }
  TapAll(names_.inputs, inputs);
  AnyValue output = Call(module_, std::move(arguments));
  TapAll(names_.outputs, TensorsIn(output));
  return output;
}

std::shared_ptr<torch::nn::Module> nn::TappedImpl::clone(
    const std::optional<c10::Device>& device) const {
  return std::make_shared<TappedImpl>(names_, module_.clone(device));
}

SequentialTaps::SequentialTaps(torch::nn::Sequential model, const std::string& prefix)
    : model_(std::move(model)) {
  TORCH_CHECK(!model_.is_empty(), "SequentialTaps \"", prefix,
              "\" of an empty module holder: construct the Sequential without nullptr");
  const auto names = model_->named_children();
  const bool is_named = prefix.size() > 1 && prefix.back() == '.';
  const std::string whole = is_named ? prefix.substr(0, prefix.size() - 1) : "";
  for (size_t i = 0; i < names.size(); ++i) {
    torch::nn::AnyModule& child = *(model_->begin() + static_cast<std::ptrdiff_t>(i));
    const std::string name = prefix + names[i].key();
    TapNames taps = {{name + ".input"}, {name}};
    if (is_named && i == 0) taps.inputs.insert(taps.inputs.begin(), whole + ".input");
    if (is_named && i + 1 == names.size()) taps.outputs.push_back(whole);
    wrappers_.push_back(std::make_shared<nn::TappedImpl>(std::move(taps), child));
    child = torch::nn::AnyModule(nn::Tapped(wrappers_.back()));
  }
}

SequentialTaps::~SequentialTaps() {
  for (size_t i = 0; i < wrappers_.size(); ++i) {
    // Taps that were put around these ones are outside of the wrapper.
    torch::nn::AnyModule* place =
        i < model_->size() ? &*(model_->begin() + static_cast<std::ptrdiff_t>(i)) : nullptr;
    while (place != nullptr && place->ptr() != wrappers_[i]) {
      auto* const outer = dynamic_cast<nn::TappedImpl*>(place->ptr().get());
      place = outer == nullptr ? nullptr : &outer->module_;
    }
    if (place == nullptr) {
      PINION_LOG(kError) << "the taps \"" << wrappers_[i]->names_.outputs.front()
                         << "\" stay as they are, because the Sequential has changed: end "
                            "SequentialTaps before its modules are changed";
      continue;
    }
    *place = wrappers_[i]->module_;
  }
}

ModuleTaps::ModuleTaps(const torch::nn::Module& model) {
  // A Sequential that is in several places gets the name of the first.
  std::set<const torch::nn::Module*> seen;
  for (const auto& module : model.named_modules()) {
    auto sequential = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(module.value());
    if (sequential == nullptr || !seen.insert(sequential.get()).second) continue;
    const std::string prefix = module.key().empty() ? "" : module.key() + ".";
    taps_.emplace_back(torch::nn::Sequential(std::move(sequential)), prefix);
  }
}

}  // namespace pinion
