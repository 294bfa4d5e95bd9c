#include "pinion/hooks/emulated/emu_nn_ops.h"

#include <ATen/core/Tensor.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include "pinion/device/allocation_label.h"
#include "pinion/hooks/emulated/emu_generator.h"
#include "pinion/hooks/emulated/emu_host_kernel.h"
#include "pinion/hooks/emulated/emu_recurrent.h"

namespace pinion::emu {
namespace {

// Saves one byte of mask per element, like a GPU, where the CPU saves the scaled noise. The noise
// is recomputed from the mask like the CPU's: 1 / (1 - p), rounded in the tensor's dtype.
std::tuple<at::Tensor, at::Tensor> Dropout(const at::Tensor& input, double p,
                                           std::optional<bool> train) {
  static const std::string* const name = new std::string("aten::native_dropout");
  HostKernel kernel(*name);
  const at::Tensor host = kernel.Read(input);
  kernel.Prepare();
  at::Tensor mask;
  at::Tensor output;
  {
    const HostScope scope;
    at::Tensor noise;
    if (train.value_or(true)) {
      noise = at::empty_like(host).bernoulli_(
          1 - p, HostGeneratorOf(DefaultGenerator(input.device().index())));
      mask = noise.to(at::kBool);
      if (p < 1) noise.div_(1 - p);
    } else {
      noise = at::ones_like(host);
      mask = noise.to(at::kBool);
    }
    output = host.mul(noise);
  }
  const AllocationLabel label(*name);
  std::tuple<at::Tensor, at::Tensor> results(kernel.Result(output), kernel.Result(mask));
  kernel.Launch();
  return results;
}

at::Tensor DropoutBackward(const at::Tensor& grad, const at::Tensor& mask, double scale) {
  static const std::string* const name = new std::string("aten::native_dropout_backward");
  HostKernel kernel(*name);
  const at::Tensor host_grad = kernel.Read(grad);
  const at::Tensor host_mask = kernel.Read(mask);
  kernel.Prepare();
  at::Tensor host;
  {
    const HostScope scope;
    at::Tensor noise = host_mask.to(host_grad.scalar_type());
    // Autograd's scale is 1 / (1 - p), and 0 for p = 1, which makes this a division by infinity.
    noise.div_(1 / scale);
    host = host_grad.mul(noise);
  }
  const AllocationLabel label(*name);
  at::Tensor result = kernel.Result(host);
  kernel.Launch();
  return result;
}

int64_t ChooseAttention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                        const std::optional<at::Tensor>& mask, double dropout, bool causal,
                        std::optional<double> scale, bool grouped) {
  return at::native::_fused_sdp_choice_cpp(query, key, value, mask, dropout, causal, scale,
                                           grouped);
}

}  // namespace

void RegisterNnOps(torch::Library& library, torch::Library& autograd) {
  library.impl("native_dropout", &Dropout);
  library.impl("native_dropout_backward", &DropoutBackward);
  at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(&ChooseAttention);
  for (const char* name :
       {"lstm.input", "lstm.data", "gru.input", "gru.data", "rnn_tanh.input", "rnn_tanh.data",
        "rnn_relu.input", "rnn_relu.data", "lstm_cell", "gru_cell"}) {
    autograd.impl(name, torch::CppFunction::makeFromBoxedFunction<&RunRecurrent>());
  }
}

}  // namespace pinion::emu
