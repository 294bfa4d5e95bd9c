#include "pinion/hooks/emulated/emu_operator.h"

#include <ATen/core/function_schema.h>
#include <ATen/core/jit_type.h>
#include <c10/core/DispatchKey.h>

#include <functional>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "pinion/allocator/base/mutex.h"

namespace pinion::emu {
namespace {

using Names = absl::flat_hash_set<std::string>;

// Operators whose result shapes depend on values, or that check values. CUDA waits for them too.
bool ShapeDependsOnValues(const std::string& name) {
  static const auto* const names = new Names{"aten::nonzero",
                                             "aten::masked_select",
                                             "aten::_unique",
                                             "aten::_unique2",
                                             "aten::unique_dim",
                                             "aten::unique_consecutive",
                                             "aten::bincount",
                                             "aten::repeat_interleave",
                                             "aten::unique_dim_consecutive",
                                             "aten::_linalg_check_errors"};
  return names->contains(name);
}

bool TakesHostTensors(const std::string& name) {
  static const auto* const names = new Names{"aten::index",
                                             "aten::_index_put_impl_",
                                             "aten::_pack_padded_sequence",
                                             "aten::_pad_packed_sequence",
                                             "aten::lstm",
                                             "aten::gru",
                                             "aten::rnn_tanh",
                                             "aten::rnn_relu"};
  return names->contains(name);
}

// Operators that do not read what they overwrite.
bool OnlyWrites(const std::string& name) {
  static const auto* const names =
      new Names{"aten::zero_",        "aten::fill_",          "aten::normal_",
                "aten::uniform_",     "aten::bernoulli_",     "aten::random_",
                "aten::exponential_", "aten::_foreach_zero_", "aten::_foreach_copy_"};
  return names->contains(name);
}

bool IsInteger(at::ScalarType type) { return c10::isIntegralType(type, /*includeBool=*/false); }

bool IsHalf(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

WiderType WiderTypeOf(const std::string& name) {
  // Counts, and products of values and bin counts, are exact in double up to 2^53.
  if (name == "aten::histc") return {&IsInteger, at::kDouble};
  static const auto* const computed_in_float = new Names{"aten::trace",
                                                         "aten::avg_pool3d",
                                                         "aten::avg_pool3d_backward",
                                                         "aten::_upsample_bilinear2d_aa",
                                                         "aten::_upsample_bilinear2d_aa_backward",
                                                         "aten::multi_margin_loss",
                                                         "aten::multi_margin_loss_backward",
                                                         "aten::multilabel_margin_loss_forward",
                                                         "aten::multilabel_margin_loss_backward"};
  if (computed_in_float->contains(name)) return {&IsHalf, at::kFloat};
  return {};
}

HostKernel::Access AccessOf(const std::string& name, const c10::Argument& argument) {
  const c10::AliasInfo* const info = argument.alias_info();
  if (info == nullptr || !info->isWrite()) return HostKernel::Access::kRead;
  return argument.is_out() || OnlyWrites(name) ? HostKernel::Access::kWrite
                                               : HostKernel::Access::kReadWrite;
}

Operator Describe(const c10::OperatorHandle& handle) {
  const c10::FunctionSchema& schema = handle.schema();
  const std::string& name = schema.name();
  const std::string full_name = c10::toString(schema.operator_name());
  Operator description = {.name = name,
                          .refusal = {},
                          .arguments = {},
                          .generator = {},
                          .results = schema.returns().size(),
                          .observed_by_host = ShapeDependsOnValues(name),
                          .takes_host_tensors = TakesHostTensors(name),
                          .cost = CostRuleOf(name),
                          .wider = WiderTypeOf(name)};
  if (!handle.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) {
    description.refusal =
        "emu runs operators with the CPU's kernels, and the CPU has none for " + full_name;
  }
  const c10::TypePtr generator = c10::OptionalType::create(c10::GeneratorType::get());
  for (const c10::Argument& argument : schema.arguments()) {
    if (*argument.type() == *generator) description.generator = description.arguments.size();
    description.arguments.push_back(AccessOf(name, argument));
  }
  for (const c10::Argument& result : schema.returns()) {
    const c10::AliasInfo* const alias = result.alias_info();
    if (alias != nullptr && !alias->isWrite() && description.refusal.empty()) {
      description.refusal = full_name +
                            " returns a view of its argument and emu has no kernel of its own for "
                            "it; a copy in its place would silently break aliasing";
    }
    const c10::TypeKind kind = result.type()->kind();
    if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) {
      description.observed_by_host = true;
    }
  }
  return description;
}

struct Cache {
  Mutex mu;
  absl::flat_hash_map<c10::OperatorHandle, std::unique_ptr<const Operator>,
                      std::hash<c10::OperatorHandle>>
      operators ABSL_GUARDED_BY(mu);
};

}  // namespace

const Operator& OperatorOf(const c10::OperatorHandle& handle) {
  static Cache* const cache = new Cache;
  {
    const MutexLock lock(cache->mu);
    const auto found = cache->operators.find(handle);
    if (found != cache->operators.end()) return *found->second;
  }
  auto description = std::make_unique<const Operator>(Describe(handle));
  const MutexLock lock(cache->mu);
  return *cache->operators.emplace(handle, std::move(description)).first->second;
}

}  // namespace pinion::emu
