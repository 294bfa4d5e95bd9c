#include "pinion/hooks/emulated/emu_recurrent.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/ivalue_inl.h>
#include <c10/core/AutogradState.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "pinion/device/allocation_label.h"
#include "pinion/hooks/emulated/emu_costs.h"
#include "pinion/hooks/emulated/emu_fallback.h"
#include "pinion/hooks/emulated/emu_host_kernel.h"
#include "pinion/hooks/emulated/emu_operator.h"
#include "pinion/hooks/emulated/emu_state.h"

namespace pinion::emu {
namespace {

using torch::autograd::variable_list;

// An operator call whose tensors have been taken out, in order.
class Call {
 public:
  Call(const c10::OperatorHandle& op, std::vector<c10::IValue> arguments)
      : op_(op), arguments_(std::move(arguments)) {}

  const c10::OperatorHandle& op() const { return op_; }
  bool grad_enabled() const { return grad_enabled_; }

  // Replaces each tensor by the result of `visit`.
  template <typename Visit>
  static void VisitTensors(std::vector<c10::IValue>& arguments, const Visit& visit) {
    for (c10::IValue& value : arguments) {
      if (value.isTensor()) {
        value = visit(value.toTensor());
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(visit(tensor));
        value = std::move(list);
      }
    }
  }

  torch::jit::Stack With(const variable_list& tensors) const {
    torch::jit::Stack stack = arguments_;
    size_t next = 0;
    VisitTensors(stack, [&](const at::Tensor&) { return tensors[next++]; });
    return stack;
  }

 private:
  c10::OperatorHandle op_;
  std::vector<c10::IValue> arguments_;
  const bool grad_enabled_ = at::GradMode::is_enabled();
};

variable_list TakeResults(torch::jit::Stack& stack) {
  variable_list results;
  for (c10::IValue& value : stack) results.push_back(std::move(value).toTensor());
  return results;
}

// The state of the CPU's generator, from which dropout between layers draws, also on emu.
class CpuRandomState {
 public:
  static at::Tensor Get() {
    const std::lock_guard<std::mutex> lock(Generator().mutex());
    return at::Tensor(Generator().unsafeGetGeneratorImpl()->get_state());
  }
  static void Set(const at::Tensor& state) {
    const std::lock_guard<std::mutex> lock(Generator().mutex());
    Generator().unsafeGetGeneratorImpl()->set_state(*state.unsafeGetTensorImpl());
  }

 private:
  static at::Generator Generator() { return at::detail::getDefaultCPUGenerator(); }
};

class Recurrent : public torch::autograd::Function<Recurrent> {
 public:
  static variable_list forward(torch::autograd::AutogradContext* context,
                               const std::shared_ptr<Call>& call, at::TensorList list) {
    const variable_list tensors = list.vec();
    context->saved_data["random_state"] = CpuRandomState::Get();
    context->saved_data["call"] = c10::IValue::make_capsule(c10::make_intrusive<CallHolder>(call));
    context->save_for_backward(tensors);
    torch::jit::Stack stack = call->With(tensors);
    // oneDNN selects training kernels when gradients are enabled; autograd disables them here.
    const at::AutoGradMode as_called(call->grad_enabled());
    RunOnHost(call->op(), &stack);
    return TakeResults(stack);
  }

  static variable_list backward(torch::autograd::AutogradContext* context,
                                const variable_list& grads) {
    const Call& call = CallOf(context->saved_data["call"]);
    TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled(), call.op().schema().name(),
                                ": emu has no double backward through recurrent layers");
    variable_list gradients(1);  // the first is for `call`
    torch::jit::Stack stack = {context->saved_data["call"], context->saved_data["random_state"],
                               context->get_saved_variables(), grads};
    DifferentiatingOperator().callBoxed(stack);
    for (at::Tensor& computed : stack.front().toTensorVector()) {
      gradients.push_back(std::move(computed));
    }
    return gradients;
  }

 private:
  struct CallHolder : torch::CustomClassHolder {
    explicit CallHolder(std::shared_ptr<Call> held) : call(std::move(held)) {}
    std::shared_ptr<Call> call;
  };
  static const Call& CallOf(const c10::IValue& holder) {
    return *static_cast<const CallHolder&>(*holder.toCapsule()).call;
  }

  // An operator, because streamed weights (hooks/weights) are resident only while operators run.
  static const c10::OperatorHandle& DifferentiatingOperator() {
    static const auto* const op = [] {
      auto* const library =
          new torch::Library(torch::Library::DEF, "pinion_emu", std::nullopt, __FILE__, __LINE__);
      library->def(
          "recurrent_backward(Any call, Tensor random_state, Tensor[] tensors, Tensor[] grads) "
          "-> Tensor[]");
      library->impl(
          "recurrent_backward",
          torch::dispatch(c10::DispatchKey::PrivateUse1,
                          torch::CppFunction::makeFromBoxedFunction<&RunDifferentiate>()));
      return new c10::OperatorHandle(
          c10::Dispatcher::singleton().findSchemaOrThrow("pinion_emu::recurrent_backward", ""));
    }();
    return *op;
  }

  static void RunDifferentiate(const c10::OperatorHandle&, torch::jit::Stack* stack) {
    const std::vector<c10::IValue> arguments = torch::jit::pop(*stack, 4);
    stack->emplace_back(Differentiate(CallOf(arguments[0]), arguments[1].toTensor(),
                                      arguments[2].toTensorVector(),
                                      arguments[3].toTensorVector()));
  }

  static variable_list Differentiate(const Call& call, const at::Tensor& random_state,
                                     const variable_list& tensors, const variable_list& grads) {
    const Operator& description = OperatorOf(call.op());
    HostKernel kernel(description.name);
    variable_list inputs, differentiable;
    std::vector<size_t> differentiated;  // where in `tensors`
    for (size_t i = 0; i < tensors.size(); ++i) {
      const bool on_device = tensors[i].device().type() == kEmu;
      inputs.push_back(on_device ? kernel.Read(tensors[i]) : tensors[i]);
      // A tensor that is given twice has one gradient, at its first place.
      if (!tensors[i].requires_grad() || inputs.back().requires_grad()) continue;
      inputs.back().set_requires_grad(true);
      differentiable.push_back(inputs.back());
      differentiated.push_back(i);
    }
    variable_list host_grads;  // zeros for unused outputs
    for (const at::Tensor& grad : grads) host_grads.push_back(kernel.Read(grad));
    kernel.Prepare();
    const variable_list computed =
        DifferentiateOnHost(call, random_state, inputs, differentiable, host_grads);
    const AllocationLabel label(description.name);
    variable_list results(tensors.size());
    for (size_t i = 0; i < differentiated.size(); ++i) {
      results[differentiated[i]] = kernel.Result(computed[i]);
    }
    const torch::jit::Stack arguments = call.With(inputs);
    kernel.Launch(3 * FlopsOf(CostRule::kRecurrent, arguments), kernel.memory_bytes());
    return results;
  }

  static variable_list DifferentiateOnHost(const Call& call, const at::Tensor& random_state,
                                           const variable_list& inputs,
                                           const variable_list& differentiable,
                                           const variable_list& grads) {
    const at::AutoGradMode enable(true);
    const at::Tensor present_state = CpuRandomState::Get();
    CpuRandomState::Set(random_state);
    torch::jit::Stack stack = call.With(inputs);
    call.op().callBoxed(stack);
    CpuRandomState::Set(present_state);
    return torch::autograd::grad(TakeResults(stack), differentiable, grads);
  }
};

}  // namespace

void RunRecurrent(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  std::vector<c10::IValue> arguments = torch::jit::pop(*stack, op.schema().arguments().size());
  // Autograd functions do not take undefined tensors, which modules without biases pass.
  for (c10::IValue& argument : arguments) {
    if (argument.isTensor() && !argument.toTensor().defined()) argument = c10::IValue();
  }
  variable_list tensors;
  Call::VisitTensors(arguments, [&](const at::Tensor& tensor) {
    tensors.push_back(tensor);
    return at::Tensor();
  });
  const auto call = std::make_shared<Call>(op, std::move(arguments));
  for (at::Tensor& result : Recurrent::apply(call, at::TensorList(tensors)))
    stack->emplace_back(std::move(result));
}

}  // namespace pinion::emu
