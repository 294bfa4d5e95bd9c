#include "pinion/hooks/checkpoint/checkpoint_module.h"

#include <c10/util/Exception.h>
#include <torch/nn/modules/container/any.h>

#include <utility>
#include <vector>

#include "pinion/hooks/checkpoint/checkpoint.h"

namespace pinion {
namespace {

using Modules = std::vector<torch::nn::AnyModule>;

at::Tensor RunModules(Modules& modules, at::Tensor x) {
  for (torch::nn::AnyModule& module : modules) x = module.forward<at::Tensor>(std::move(x));
  return x;
}

}  // namespace

at::Tensor checkpoint_sequential(const torch::nn::Sequential& modules, int64_t segments,
                                 const at::Tensor& input, const CheckpointOptions& options) {
  TORCH_CHECK(!modules.is_empty() && !modules->is_empty(),
              "checkpoint_sequential of a Sequential that is empty: give it one module at least");
  const auto count = static_cast<int64_t>(modules->size());
  TORCH_CHECK(segments >= 1 && segments <= count, "checkpoint_sequential: ", segments,
              " segments of ", count, " modules: give it 1 to ", count);
  const int64_t length = count / segments;
  at::Tensor x = input;
  for (int64_t segment = 0; segment < segments; ++segment) {
    const bool is_last = segment == segments - 1;
    const auto begin = modules->begin() + segment * length;
    Modules part(begin, is_last ? modules->end() : begin + length);
    if (is_last) return RunModules(part, std::move(x));
    // Moves the input out, so that it is released when the second module runs.
    const auto run = [part = std::move(part)](at::Tensor& in) mutable {
      return RunModules(part, std::move(in));
    };
    x = checkpoint(options, run, std::move(x));
  }
  return x;
}

nn::CheckpointImpl::CheckpointImpl(TensorModule module, const CheckpointOptions& options)
    : torch::nn::Module("pinion::nn::Checkpoint"), module_(std::move(module)), options_(options) {
  register_module("module", module_.ptr());
}

at::Tensor nn::CheckpointImpl::forward(const at::Tensor& input) {
  const auto run = [module = module_](const at::Tensor& x) { return module.forward(x); };
  return checkpoint(options_, run, input);
}

std::shared_ptr<torch::nn::Module> nn::CheckpointImpl::clone(
    const std::optional<c10::Device>& device) const {
  auto copy = std::make_shared<CheckpointImpl>(*this);
  copy->module_ = module_.clone(device);
  copy->replace_module("module", copy->module_.ptr());
  return copy;
}

}  // namespace pinion
