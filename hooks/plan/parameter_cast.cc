#include "pinion/hooks/plan/parameter_cast.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/_to_copy.h>
#include <ATen/record_function.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/library.h>

#include <thread>
#include <typeinfo>
#include <vector>

#include "pinion/hooks/autograd/torch_bridge.h"

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

class WatchedStorages {
 public:
  FusedWrites Watch(const c10::StorageImpl* storage) {
    MutexLock lock(mu_);
    std::weak_ptr<std::atomic<uint64_t>>& watched = watched_[storage];
    if (auto writes = watched.lock()) return writes;
    const std::shared_ptr<std::atomic<uint64_t>> writes(
        new std::atomic<uint64_t>(0), [this, storage](const std::atomic<uint64_t>* count) {
          Forget(storage);
          delete count;
        });
    watched = writes;
    return writes;
  }

  void Count(const at::Tensor& written) {
    if (!IsPlainTensor(written)) return;
    std::shared_ptr<std::atomic<uint64_t>> writes;  // may be the last owner: destroyed after mu_
    MutexLock lock(mu_);
    const auto found = watched_.find(written.storage().unsafeGetStorageImpl());
    if (found == watched_.end()) return;
    writes = found->second.lock();
    if (writes != nullptr) ++*writes;
  }

 private:
  // Does nothing if the storage has been watched anew.
  void Forget(const c10::StorageImpl* storage) {
    MutexLock lock(mu_);
    const auto found = watched_.find(storage);
    if (found != watched_.end() && found->second.expired()) watched_.erase(found);
  }

  Mutex mu_;
  absl::flat_hash_map<const c10::StorageImpl*, std::weak_ptr<std::atomic<uint64_t>>> watched_
      ABSL_GUARDED_BY(mu_);
};

WatchedStorages& TheWatched() {
  // Leaked: static destructors may destroy graphs.
  static WatchedStorages* const watched = new WatchedStorages;
  return *watched;
}

void CountWrites(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                 torch::jit::Stack* stack) {
  const c10::IValue& written = torch::jit::peek(*stack, 0, op.schema().arguments().size());
  for (const at::Tensor& tensor : written.toTensorVector()) TheWatched().Count(tensor);
  const at::AutoDispatchBelowADInplaceOrView below;
  op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
}

FusedWrites WatchFusedWrites(const c10::Storage& storage) {
  static torch::Library* const library = [] {
    auto* const made = new torch::Library(torch::Library::IMPL, "aten",
                                          c10::DispatchKey::ADInplaceOrView, __FILE__, __LINE__);
    for (const char* op :
         {"_fused_adam_", "_fused_adam_.tensor_lr", "_fused_adamw_", "_fused_adamw_.tensor_lr",
          "_fused_sgd_", "_fused_sgd_.tensor_lr", "_fused_adagrad_", "_fused_adagrad_.tensor_lr"}) {
      made->impl(op, torch::CppFunction::makeFromBoxedFunction<&CountWrites>());
    }
    return made;
  }();
  static_cast<void>(library);
  return TheWatched().Watch(storage.unsafeGetStorageImpl());
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

void CastNotes::Add(const at::Tensor& parameter) {
  notes_.try_emplace(parameter.unsafeGetTensorImpl(), WeakTensorImpl(parameter.getIntrusivePtr()),
                     ParameterState(parameter));
}

const ParameterState* CastNotes::Find(const at::Tensor& parameter) const {
  const auto found = notes_.find(parameter.unsafeGetTensorImpl());
  return found == notes_.end() ? nullptr : &found->second.second;
}

CastNotes CastSources::Note() {
  CastNotes notes;
  std::vector<at::Tensor> parameters;  // destroyed after the lock
  {
    MutexLock lock(mu_);
    parameters.reserve(known_.size());
    absl::erase_if(known_, [&](const auto& known) {
      auto impl = known.second.lock();
      if (!impl) return true;
      parameters.emplace_back(std::move(impl));
      return false;
    });
  }
  for (const at::Tensor& parameter : parameters) notes.Add(parameter);
  return notes;
}

std::unique_ptr<const ParameterCast> CastSources::Find(const at::Tensor& tensor,
                                                       const CastNotes& notes,
                                                       const NodeId& begin) {
  std::unique_ptr<const ParameterCast> cast = ParameterCast::Of(tensor);
  if (cast == nullptr) return nullptr;
  const at::Tensor& parameter = cast->parameter();
  const ParameterState* const noted = notes.Find(parameter);
  if (noted == nullptr) {
    MutexLock lock(mu_);
    known_.try_emplace(parameter.unsafeGetTensorImpl(), parameter.getIntrusivePtr());
    return nullptr;
  }
  const std::optional<NodeId>& node = cast->node();
  const bool is_of_scope =
      node.has_value() && node->thread == begin.thread && node->sequence > begin.sequence;
  return is_of_scope && noted->IsOf(parameter) ? std::move(cast) : nullptr;
}

}  // namespace pinion
