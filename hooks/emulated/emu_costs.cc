#include "pinion/hooks/emulated/emu_costs.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "pinion/hooks/emulated/emu_host_kernel.h"

namespace pinion::emu {
namespace {

double Numel(const c10::IValue& tensor) { return static_cast<double>(tensor.toTensor().numel()); }

double Size(const c10::IValue& tensor, int64_t dim) {
  return static_cast<double>(tensor.toTensor().size(dim));
}

// Every element of `self` is multiplied with every column of `other`: mm, bmm, addmv and dot alike.
double MatmulFlops(const c10::IValue& self, const c10::IValue& other) {
  return 2 * Numel(self) * (other.toTensor().dim() < 2 ? 1 : Size(other, -1));
}

double ConvolutionFlops(c10::ArrayRef<c10::IValue> arguments) {
  const at::Tensor& input = arguments[0].toTensor();
  const at::Tensor& weight = arguments[1].toTensor();
  // Flops per element of the output, or of the input if the convolution is transposed.
  const double per_element = 2.0 * static_cast<double>(weight.numel()) / weight.size(0);
  if (arguments[6].toBool()) return per_element * static_cast<double>(input.numel());
  const std::vector<int64_t> stride = arguments[3].toIntVector();
  const std::vector<int64_t> padding = arguments[4].toIntVector();
  const std::vector<int64_t> dilation = arguments[5].toIntVector();
  const auto at = [](const std::vector<int64_t>& values, size_t dim) {
    return values[std::min(dim, values.size() - 1)];
  };
  const size_t dims = static_cast<size_t>(weight.dim()) - 2;
  double outputs = static_cast<double>(input.size(0)) * static_cast<double>(weight.size(0));
  for (size_t dim = 0; dim < dims; ++dim) {
    const int64_t length = input.size(input.dim() - static_cast<int64_t>(dims - dim));
    const int64_t kernel = at(dilation, dim) * (weight.size(static_cast<int64_t>(dim) + 2) - 1) + 1;
    outputs *= static_cast<double>((length + 2 * at(padding, dim) - kernel) / at(stride, dim) + 1);
  }
  return per_element * outputs;
}

double ConvolutionBackwardFlops(c10::ArrayRef<c10::IValue> arguments) {
  const at::Tensor& grad = arguments[0].toTensor();
  const at::Tensor& input = arguments[1].toTensor();
  const at::Tensor& weight = arguments[2].toTensor();
  const bool transposed = arguments[7].toBool();
  const double elements = static_cast<double>(transposed ? input.numel() : grad.numel());
  const double one = 2.0 * static_cast<double>(weight.numel()) / weight.size(0) * elements;
  const auto mask = arguments[10].toBoolList();
  return one * ((mask.get(0) ? 1 : 0) + (mask.get(1) ? 1 : 0));
}

// Two products of [queries x head] and [head x keys]; backward has five. A causal mask needs half.
double AttentionFlops(const c10::IValue& query, const c10::IValue& key, bool causal, int products) {
  return 2.0 * products * Numel(query) * Size(key, -2) * (causal ? 0.5 : 1);
}

// The input comes first, then the hidden state, or the sizes of batches and a hidden state with a
// dimension for layers, then weights and biases.
double RecurrentFlops(c10::ArrayRef<c10::IValue> arguments) {
  double weights = 0;
  for (const c10::IValue& argument : arguments.slice(2)) {
    if (argument.isTensorList()) {
      for (const at::Tensor& tensor : argument.toTensorVector()) {
        if (tensor.dim() == 2) weights += static_cast<double>(tensor.numel());
      }
    } else if (argument.isTensor() && argument.toTensor().dim() == 2) {
      weights += Numel(argument);
    }
  }
  const at::Tensor& input = arguments[0].toTensor();
  return 2 * weights *
         static_cast<double>(c10::multiply_integers(input.sizes().slice(0, input.dim() - 1)));
}

}  // namespace

CostRule CostRuleOf(const std::string& name) {
  static const auto* const rules = new absl::flat_hash_map<std::string, CostRule>{
      {"aten::mm", CostRule::kMatmul},
      {"aten::bmm", CostRule::kMatmul},
      {"aten::dot", CostRule::kMatmul},
      {"aten::addmm", CostRule::kAddMatmul},
      {"aten::addmm_", CostRule::kAddMatmul},
      {"aten::_addmm_activation", CostRule::kAddMatmul},
      {"aten::addmv", CostRule::kAddMatmul},
      {"aten::addmv_", CostRule::kAddMatmul},
      {"aten::addbmm", CostRule::kAddMatmul},
      {"aten::addbmm_", CostRule::kAddMatmul},
      {"aten::baddbmm", CostRule::kAddMatmul},
      {"aten::baddbmm_", CostRule::kAddMatmul},
      {"aten::convolution", CostRule::kConvolution},
      {"aten::_convolution", CostRule::kConvolution},
      {"aten::convolution_backward", CostRule::kConvolutionBackward},
      {"aten::_scaled_dot_product_flash_attention_for_cpu", CostRule::kAttention},
      {"aten::_scaled_dot_product_flash_attention_for_cpu_backward", CostRule::kAttentionBackward},
      {"aten::lstm", CostRule::kRecurrent},
      {"aten::gru", CostRule::kRecurrent},
      {"aten::rnn_tanh", CostRule::kRecurrent},
      {"aten::rnn_relu", CostRule::kRecurrent},
      {"aten::lstm_cell", CostRule::kRecurrent},
      {"aten::gru_cell", CostRule::kRecurrent},
      {"aten::index", CostRule::kGather},
      {"aten::index_select", CostRule::kGather},
      {"aten::gather", CostRule::kGather},
      {"aten::take", CostRule::kGather},
      {"aten::_index_put_impl_", CostRule::kGather},
      {"aten::index_add_", CostRule::kGather},
      {"aten::index_copy_", CostRule::kGather},
      {"aten::scatter_", CostRule::kGather},
      {"aten::scatter_add_", CostRule::kGather},
  };
  const auto found = rules->find(name);
  return found == rules->end() ? CostRule::kMemory : found->second;
}

double FlopsOf(CostRule rule, c10::ArrayRef<c10::IValue> arguments) {
  switch (rule) {
    case CostRule::kMemory:
    case CostRule::kGather:
      return 0;
    case CostRule::kMatmul:
      return MatmulFlops(arguments[0], arguments[1]);
    case CostRule::kAddMatmul:
      return MatmulFlops(arguments[1], arguments[2]);
    case CostRule::kConvolution:
      return ConvolutionFlops(arguments);
    case CostRule::kConvolutionBackward:
      return ConvolutionBackwardFlops(arguments);
    case CostRule::kAttention:
      return AttentionFlops(arguments[0], arguments[1], arguments[4].toBool(), /*products=*/2);
    case CostRule::kAttentionBackward:
      return AttentionFlops(arguments[1], arguments[2], arguments[7].toBool(), /*products=*/5);
    case CostRule::kRecurrent:
      return RecurrentFlops(arguments);
  }
  return 0;
}

double GatherBytes(c10::ArrayRef<c10::IValue> arguments, bool in_place, double whole_bytes) {
  const double table = TrafficBytes(arguments[0].toTensor()) * (in_place ? 2 : 1);
  const double rest = whole_bytes - table;
  // The gathered or scattered elements are read once more than `rest` counts.
  return rest + std::min(rest, table);
}

}  // namespace pinion::emu
