#include "pinion/hooks/checkpoint/forward_state.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "pinion/allocator/base/check.h"
#include "pinion/hooks/autograd/libtorch_compat.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/autograd/torch_bridge.h"

namespace pinion {
namespace {

// Returns the accelerator's type if it has devices.
std::optional<c10::DeviceType> TypeOfDevices() {
  const std::optional<c10::DeviceType> type = at::accelerator::getAccelerator();
  if (!type.has_value() || c10::impl::VirtualGuardImpl(*type).deviceCount() == 0) {
    return std::nullopt;
  }
  return type;
}

// Includes the current device, for segments whose tensors are captured or inside other values.
std::vector<at::Generator> GeneratorsOf(const std::vector<at::Tensor>& inputs) {
  std::vector<at::Generator> generators = {at::detail::getDefaultCPUGenerator()};
  const auto add = [&generators](c10::Device device) {
    const at::Generator& generator = at::globalContext().defaultGenerator(device);
    if (std::find(generators.begin(), generators.end(), generator) == generators.end()) {
      generators.push_back(generator);
    }
  };
  if (const auto type = TypeOfDevices()) add(c10::impl::VirtualGuardImpl(*type).getDevice());
  for (const at::Tensor& input : inputs) {
    if (input.defined() && at::accelerator::isAccelerator(input.device().type())) {
      add(input.device());
    }
  }
  return generators;
}

// The grad_fn of inputs that had a history in forward. Such inputs must not be leaves, because a
// segment may change them in place.
class EndOfSegment : public torch::autograd::Node {
 public:
  EndOfSegment() : Node(/*sequence_nr=*/0) {}
  std::string name() const override { return "PinionEndOfCheckpoint"; }
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override { return {}; }
};

}  // namespace

void WaitForTensor(const at::Tensor& tensor, const c10::Stream& made_on,
                   const c10::Stream& stream) {
  if (made_on == stream) return;
  if (kComputedOnOtherStream.enabled()) {
    c10::Event computed(made_on.device_type());
    computed.record(made_on);
    computed.block(stream);
  }
  if (tensor.has_storage()) RecordOnStream(tensor.storage(), stream);
}

ForwardState::ForwardState(const std::vector<at::Tensor>& inputs, bool preserve_rng_state)
    : ForwardState(preserve_rng_state ? GeneratorsOf(inputs) : std::vector<at::Generator>()) {
  const std::optional<c10::DeviceType> accelerator = TypeOfDevices();
  if (!accelerator.has_value()) return;
  const c10::impl::VirtualGuardImpl guard(*accelerator);
  device_ = guard.getDevice();
  for (c10::DeviceIndex index = 0; index < guard.deviceCount(); ++index) {
    streams_.push_back(guard.getStream(c10::Device(*accelerator, index)));
  }
}

ForwardState::ForwardState(const std::vector<at::Generator>& generators)
    : autocast_cache_enabled_(at::autocast::is_autocast_cache_enabled()) {
  for (const c10::DeviceType type : at::autocast::_AUTOCAST_SUPPORTED_DEVICES) {
    autocast_.push_back(
        {type, at::autocast::is_autocast_enabled(type), at::autocast::get_autocast_dtype(type)});
  }
  for (at::Generator generator : generators) {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generators_.push_back({generator, generator.get_state()});
  }
}

std::vector<at::Generator> ForwardState::generators() const {
  std::vector<at::Generator> generators;
  for (const GeneratorState& state : generators_) generators.push_back(state.generator);
  return generators;
}

void ForwardState::GeneratorState::Set() const {
  at::Generator target = generator;
  const std::lock_guard<std::mutex> lock(target.mutex());
  target.set_state(state);
}

void ForwardState::SetAutocast() const {
  for (const Autocast& autocast : autocast_) {
    at::autocast::set_autocast_enabled(autocast.type, autocast.enabled);
    at::autocast::set_autocast_dtype(autocast.type, autocast.dtype);
  }
  at::autocast::set_autocast_cache_enabled(autocast_cache_enabled_);
}

// Like an autocast region: cached casts of weights are freed when the outermost one ends.
ForwardState::Mode::Mode(const ForwardState& forward) : before_(forward.generators()) {
  at::autocast::increment_nesting();
  try {
    forward.SetAutocast();
    for (const GeneratorState& generator : forward.generators_) generator.Set();
  } catch (...) {
    SetBack();
    throw;
  }
}

ForwardState::Mode::~Mode() { SetBack(); }

void ForwardState::Mode::SetBack() const {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  before_.SetAutocast();
  for (const GeneratorState& generator : before_.generators_) {
    try {
      generator.Set();
    } catch (const std::exception& error) {
      PINION_LOG(kError) << "random numbers of the process may repeat themselves: the state of a "
                            "generator could not be set back after a checkpoint: "
                         << error.what();
    }
  }
}

CheckpointInputs::CheckpointInputs(const std::vector<at::Tensor>& inputs) {
  for (const at::Tensor& input : inputs) saved_.emplace_back(input, /*is_output=*/false);
}

torch::autograd::variable_list CheckpointInputs::apply(torch::autograd::variable_list&&) {
  TORCH_CHECK(false, "the node that keeps a checkpoint's inputs is in no graph");
}

std::vector<at::Tensor> CheckpointInputs::Unpack() {
  const UserReadScope for_the_segment;
  const NodePtr end = MakeNode<EndOfSegment>();
  std::vector<at::Tensor> inputs;
  for (const torch::autograd::SavedVariable& saved : saved_) {
    // Before NoGradGuard: unpack hooks must see whether this backward builds a graph.
    const at::Tensor input = saved.unpack(getptr());
    const at::NoGradGuard no_grad;
    inputs.push_back(input.defined() ? input.detach() : input);
    if (!input.defined() || !input.requires_grad()) continue;
    if (input.is_leaf()) {
      inputs.back().set_requires_grad(true);
    } else {
      const uint32_t number = end->add_input_metadata(inputs.back());
      torch::autograd::impl::set_gradient_edge(inputs.back(), {end, number});
    }
  }
  return inputs;
}

}  // namespace pinion
