#include "pinion/hooks/emulated/emu_fallback.h"

#include <ATen/core/Generator.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/ivalue_inl.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>

#include "pinion/device/allocation_label.h"
#include "pinion/hooks/emulated/emu_costs.h"
#include "pinion/hooks/emulated/emu_generator.h"
#include "pinion/hooks/emulated/emu_host_kernel.h"
#include "pinion/hooks/emulated/emu_operator.h"
#include "pinion/hooks/emulated/emu_state.h"

namespace pinion::emu {
namespace {

using Arguments = c10::ArrayRef<c10::IValue>;

bool IsBoolean(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
}

// Converts the arguments on the stack to the CPU's tensors, and the results to the device's.
class BoxedCall {
 public:
  BoxedCall(const Operator& op, torch::jit::Stack* stack)
      : op_(op), stack_(stack), kernel_(op.name), count_(op.arguments.size()) {
    const Arguments given = torch::jit::last(*stack, count_);
    given_.append(given.begin(), given.end());
  }

  HostKernel& kernel() { return kernel_; }
  // Returns the original arguments, with tensors of the device.
  Arguments arguments() const { return given_; }

  void ArgumentsToHost() {
    const size_t first = stack_->size() - count_;
    for (size_t i = 0; i < count_; ++i) Convert((*stack_)[first + i], op_.arguments[i]);
    // The generator comes last because the default one depends on the device.
    if (op_.generator.has_value()) ConvertGenerator((*stack_)[first + *op_.generator]);
  }

  // Converts the arguments to the operator's wider type; Narrow() converts the results back.
  void Widen() {
    if (op_.wider.is_narrow == nullptr) return;
    const size_t first = stack_->size() - count_;
    for (size_t i = 0; i < count_; ++i) {
      c10::IValue& value = (*stack_)[first + i];
      if (!value.isTensor()) continue;
      const at::Tensor host = value.toTensor();
      if (!op_.wider.is_narrow(host.scalar_type())) continue;
      narrow_ = host.scalar_type();
      const at::Tensor wide = host.to(op_.wider.wide);
      if (op_.arguments[i] != HostKernel::Access::kRead) widened_.emplace_back(host, wide);
      value = wide;
    }
  }

  void Narrow() {
    if (!narrow_.has_value()) return;
    for (const auto& [host, wide] : widened_) {
      host.resize_(wide.sizes());
      host.copy_(wide);
    }
    for (size_t i = stack_->size() - op_.results; i < stack_->size(); ++i) {
      c10::IValue& value = (*stack_)[i];
      const at::Tensor& result = value.toTensor();
      const auto* const written =
          std::find_if(widened_.begin(), widened_.end(),
                       [&](const auto& widened) { return widened.second.is_same(result); });
      value = written == widened_.end() ? result.to(*narrow_) : written->first;
    }
  }

  void ResultsToDevice() {
    for (size_t i = stack_->size() - op_.results; i < stack_->size(); ++i) {
      c10::IValue& value = (*stack_)[i];
      if (value.isTensor()) {
        value = kernel_.Result(value.toTensor());
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> tensors;
        for (const at::Tensor& tensor : value.toTensorVector()) {
          tensors.push_back(kernel_.Result(tensor));
        }
        value = std::move(tensors);
      }
    }
  }

  // Returns whether the operator has boolean indices: the host must then know how many are true.
  bool indexed_by_mask() const { return indexed_by_mask_; }

 private:
  at::Tensor ConvertTensor(const at::Tensor& tensor, HostKernel::Access access) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() == kEmu) return kernel_.Alias(tensor, access);
    const bool scalar = tensor.dim() == 0 && access == HostKernel::Access::kRead;
    TORCH_CHECK(tensor.is_cpu() && (scalar || op_.takes_host_tensors), op_.name,
                " expects all tensors on one device, but found one of shape ", tensor.sizes(),
                " on ", tensor.device(), " beside those on emu");
    return tensor;
  }

  void Convert(c10::IValue& value, HostKernel::Access access) {
    if (value.isTensor()) {
      value = ConvertTensor(value.toTensor(), access);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> tensors;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        tensors.push_back(ConvertTensor(tensor, access));
      }
      value = std::move(tensors);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> tensors;
      for (const std::optional<at::Tensor>& given : value.toOptionalTensorVector()) {
        const at::Tensor tensor = given.value_or(at::Tensor());
        if (IsBoolean(tensor)) indexed_by_mask_ = true;
        tensors.push_back(ConvertTensor(tensor, access));
      }
      value = std::move(tensors);
    } else if (value.isDevice()) {
      kernel_.SetDevice(IndexOf(value.toDevice()));
      value = c10::Device(c10::kCPU);
    }
  }

  void ConvertGenerator(c10::IValue& value) {
    if (value.isNone()) {
      value = HostGeneratorOf(DefaultGenerator(kernel_.device()));
      return;
    }
    const at::Generator& given = value.toGenerator();
    if (given.device().type() != kEmu) return;
    TORCH_CHECK(given.device().index() == kernel_.device(), op_.name,
                " on emu:", static_cast<int>(kernel_.device()), " was given a generator of ",
                given.device());
    value = HostGeneratorOf(given);
  }

  const Operator& op_;
  torch::jit::Stack* const stack_;
  HostKernel kernel_;
  const size_t count_;
  c10::SmallVector<c10::IValue, 8> given_;
  bool indexed_by_mask_ = false;
  std::optional<at::ScalarType> narrow_;
  c10::SmallVector<std::pair<at::Tensor, at::Tensor>, 2>
      widened_;  // written tensors: original and widened
};

}  // namespace

void RunOnHost(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Operator& description = OperatorOf(op);
  TORCH_CHECK_NOT_IMPLEMENTED(description.refusal.empty(), description.refusal);
  BoxedCall call(description, stack);
  HostKernel& kernel = call.kernel();
  const double flops = FlopsOf(description.cost, call.arguments());
  call.ArgumentsToHost();
  kernel.Prepare();
  {
    const HostScope scope;
    call.Widen();
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    call.Narrow();
  }
  kernel.UpdateWritten();
  {
    const AllocationLabel label(description.name);
    call.ResultsToDevice();
  }
  double bytes = kernel.memory_bytes();
  if (description.cost == CostRule::kGather) {
    const bool in_place = description.arguments[0] != HostKernel::Access::kRead;
    bytes = GatherBytes(call.arguments(), in_place, bytes);
  }
  kernel.Launch(flops, bytes);
  if (description.observed_by_host || call.indexed_by_mask()) kernel.Synchronize();
}

void RunLabelled(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const AllocationLabel label(OperatorOf(op).name);
  // PrivateUse3 has no kernels, so LibTorch's composite kernel runs on the tensors' device.
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::PrivateUse3), stack);
}

}  // namespace pinion::emu
