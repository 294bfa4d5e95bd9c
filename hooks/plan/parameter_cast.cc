#include "pinion/hooks/plan/parameter_cast.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_to_copy.h>
#include <ATen/record_function.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <thread>
#include <typeinfo>

namespace pinion {
namespace {

bool IsLowPrecision(c10::ScalarType type) { return type == at::kBFloat16 || type == at::kHalf; }

// Whether the tensor covers all of its storage, without gaps.
bool FillsItsStorage(const at::TensorBase& tensor) {
  return tensor.storage_offset() == 0 && tensor.is_non_overlapping_and_dense() &&
         tensor.nbytes() == tensor.storage().nbytes();
}

// A view, or a part of a flat buffer, can be written through tensors with other version counters.
bool MayBeCastAgain(const at::Tensor& parameter, const at::TensorBase& cast) {
  return parameter.is_floating_point() && parameter.scalar_type() != cast.scalar_type() &&
         parameter.device() == cast.device() && IsPlainStrided(parameter) && !parameter.is_view() &&
         FillsItsStorage(parameter) && FillsItsStorage(cast) && parameter.sizes() == cast.sizes() &&
         parameter.strides() == cast.strides();
}

}  // namespace

ParameterState::ParameterState(const at::Tensor& parameter)
    : storage_(parameter.storage().getWeakStorageImpl()),
      fused_writes_(WatchFusedWrites(parameter.storage())),
      data_(parameter.storage().data()),
      version_(parameter._version()),
      writes_(*fused_writes_) {}

bool ParameterState::IsOf(const at::Tensor& parameter) const {
  const c10::Storage& storage = parameter.storage();
  return storage.unsafeGetStorageImpl() == storage_._unsafe_get_target() &&
         storage.data() == data_ && parameter._version() == version_ && *fused_writes_ == writes_;
}

std::unique_ptr<const ParameterCast> ParameterCast::Of(const at::Tensor& tensor) {
  if (!IsLowPrecision(tensor.scalar_type())) return nullptr;
  const at::TensorBase& cast = BaseOf(tensor);
  const torch::autograd::Node* const node = cast.grad_fn().get();
  if (node == nullptr || node->num_outputs() != 1) return nullptr;
  const torch::autograd::Node* const source = node->next_edge(0).function.get();
  // Cheapest check first: few tensors are functions of one leaf alone.
  if (source == nullptr || typeid(*source) != typeid(torch::autograd::AccumulateGrad) ||
      node->name() != "ToCopyBackward0" || !IsLowPrecision(cast.scalar_type())) {
    return nullptr;
  }
  const auto& leaf = static_cast<const torch::autograd::AccumulateGrad&>(*source);
  // An in-place write may leave the node unchanged.
  if (cast._version() != 0 || !MayBeCastAgain(leaf.variable, cast)) return nullptr;
  std::optional<NodeId> made_by;
  if (node->thread_id() == at::RecordFunction::currentThreadId()) {
    made_by = {std::this_thread::get_id(), node->sequence_nr() + 1};
  }
  return std::unique_ptr<const ParameterCast>(new ParameterCast(cast, leaf.variable, made_by));
}

ParameterCast::ParameterCast(const at::TensorBase& cast, const at::Tensor& parameter,
                             const std::optional<NodeId>& node)
    : parameter_(parameter),
      state_(parameter),
      sizes_(cast.sizes()),
      strides_(cast.strides()),
      type_(cast.scalar_type()),
      node_(node) {}

bool ParameterCast::IsUnchanged() const {
  return state_.IsOf(parameter_) && parameter_.sizes() == sizes_ &&
         parameter_.strides() == strides_;
}

c10::Storage ParameterCast::Again() const {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return at::_to_copy(parameter_, at::TensorOptions(type_)).storage();
}

std::string ParameterCast::Describe() const {
  return c10::str(parameter_.scalar_type(), " ", c10::IntArrayRef(sizes_));
}

}  // namespace pinion
