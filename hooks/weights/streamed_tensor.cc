#include "pinion/hooks/weights/streamed_tensor.h"

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/csrc/jit/serialization/pickler_helper.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <string_view>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/match.h"
#include "absl/types/span.h"
#include "pinion/allocator/base/mutex.h"

namespace pinion {
namespace {

// The context of a storage's DataPtr.
using KeeperReference = std::shared_ptr<ResidencyKeeper>;

void DeleteKeeperReference(void* reference) { delete static_cast<KeeperReference*>(reference); }

struct StreamedTag {
  ResidencyKeeper* keeper = nullptr;  // lives as long as the storage
  uint32_t unit = 0;
};

// The keeper and unit of each storage. A storage's own pointer cannot say: other threads change it.
class StreamedTags {
 public:
  static StreamedTags& OfProcess() {
    static auto* const tags = new StreamedTags();
    return *tags;
  }
  void Add(const c10::StorageImpl* storage, StreamedTag tag) {
    const MutexLock lock(mu_);
    tags_[storage] = tag;
  }
  void Forget(const c10::StorageImpl* storage) {
    const MutexLock lock(mu_);
    tags_.erase(storage);
  }
  StreamedTag Find(const at::Tensor& tensor) {
    const MutexLock lock(mu_);
    const auto found = tags_.find(tensor.storage().unsafeGetStorageImpl());
    TORCH_CHECK(found != tags_.end(),
                "a streamed weight was given other memory, by set_(): copy into "
                "WeightOffloader::host_parameters() within Step instead");
    return found->second;
  }

 private:
  Mutex mu_;
  absl::flat_hash_map<const c10::StorageImpl*, StreamedTag> tags_ ABSL_GUARDED_BY(mu_);
};

// The only operator that Tensor::set_data calls.
constexpr std::string_view kSetsData = "aten::_has_compatible_shallow_copy_type";

// Operators that read or change metadata alone.
constexpr std::array<std::string_view, 6> kTouchNoBytes = {
    "aten::requires_grad_", "aten::retain_grad", "aten::detach_",
    "aten::record_stream",  "aten::set_data",    kSetsData};

// The units that an operator uses. Leaves those that were entered.
class UsedUnits {
 public:
  UsedUnits() = default;
  ~UsedUnits() {
    for (size_t i = 0; i < entered_; ++i) used_[i].keeper->Leave(used_[i].unit);
  }
  UsedUnits(const UsedUnits&) = delete;
  UsedUnits& operator=(const UsedUnits&) = delete;

  void Add(const StreamedTag& tag, bool is_written) {
    for (Use& use : used_) {
      if (use.keeper.get() != tag.keeper || use.unit != tag.unit) continue;
      use.is_written |= is_written;
      return;
    }
    // The operator may release the keeper's last tensor.
    used_.push_back({tag.keeper->shared_from_this(), tag.unit, is_written});
  }
  void Enter(uint64_t argument_bytes) {
    for (; entered_ < used_.size(); ++entered_) {
      used_[entered_].keeper->Enter(used_[entered_].unit, argument_bytes);
    }
  }
  void OnWritten() const {
    for (const Use& use : used_) {
      if (use.is_written) use.keeper->OnWritten(use.unit);
    }
  }

 private:
  struct Use {
    KeeperReference keeper;
    uint32_t unit = 0;
    bool is_written = false;
  };
  absl::InlinedVector<Use, 2> used_;
  size_t entered_ = 0;
};

void ForEachTensor(const c10::IValue& argument, absl::FunctionRef<void(const at::Tensor&)> visit) {
  if (argument.isTensor()) {
    visit(argument.toTensor());
  } else if (argument.isTensorList()) {
    for (const at::Tensor& tensor : argument.toTensorVector()) visit(tensor);
  } else if (argument.isList()) {
    for (const c10::IValue& element : argument.toListRef()) {
      if (element.isTensor()) visit(element.toTensor());
    }
  }
}

// Whether an operator writes to an argument. Schemas do not say so of running statistics, which
// normalisation changes in training.
bool IsWritten(const c10::FunctionSchema& schema, size_t index, const torch::jit::Stack& stack) {
  const std::vector<c10::Argument>& arguments = schema.arguments();
  if (const c10::AliasInfo* const alias = arguments[index].alias_info()) return alias->isWrite();
  const std::string& name = arguments[index].name();
  if (name != "running_mean" && name != "running_var") return false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& flag = arguments[i].name();
    if (flag == "training" || flag == "use_input_stats") {
      return torch::jit::peek(stack, i, arguments.size()).toBool();
    }
  }
  return !absl::StrContains(schema.name(), "backward");
}

// The tensor is plain afterwards, so that its operators do not pass this key.
void ReportReplaced(c10::ArrayRef<c10::IValue> arguments) {
  const at::Tensor& tensor = arguments[0].toTensor();
  if (!IsStreamed(tensor) || IsStreamed(arguments[1].toTensor())) return;
  const StreamedTag tag = StreamedTags::OfProcess().Find(tensor);
  tag.keeper->OnReplaced(tag.unit, tensor);
}

// The fallback of the key. Operators called by the kernel do not get here again.
void RunWithStreamed(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                     torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const bool touches_none =
      std::find(kTouchNoBytes.begin(), kTouchNoBytes.end(), schema.name()) != kTouchNoBytes.end();
  const bool returns_view = std::any_of(
      schema.returns().begin(), schema.returns().end(), [](const c10::Argument& result) {
        return result.alias_info() != nullptr && !result.alias_info()->isWrite();
      });
  const c10::DispatchKeySet below =
      keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kStreamedKey);
  // An operator that returns a view or a copy, such as reshape, calls another one for the copy.
  if (touches_none || returns_view) {
    if (schema.name() == kSetsData) ReportReplaced(torch::jit::last(*stack, 2));
    op.redispatchBoxed(below, stack);
    return;
  }
  UsedUnits units;
  const size_t count = schema.arguments().size();
  const auto arguments = torch::jit::last(*stack, count);
  uint64_t argument_bytes = 0;
  at::Tensor done;  // written by its keeper
  for (size_t i = 0; i < count; ++i) {
    const bool is_written = IsWritten(schema, i, *stack);
    ForEachTensor(arguments[i], [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      if (!IsStreamed(tensor)) {
        // nbytes() is defined for strided tensors alone.
        if (tensor.layout() == at::kStrided) argument_bytes += tensor.nbytes();
        return;
      }
      const StreamedTag tag = StreamedTags::OfProcess().Find(tensor);
      if (is_written && tag.keeper->Write(tag.unit, {schema, arguments, tensor})) done = tensor;
      units.Add(tag, is_written);
    });
  }
  if (done.defined()) {
    torch::jit::drop(*stack, count);
    stack->emplace_back(std::move(done));
    return;
  }
  units.Enter(argument_bytes);
  const c10::impl::ExcludeDispatchKeyGuard inside(kStreamedKey);
  op.redispatchBoxed(below, stack);
  units.OnWritten();
}

// Makes torch::save throw. It reads storages without an operator, but calls this hook first.
void RefuseToSave(c10::DeviceType type) {
  auto& backend = torch::jit::GetBackendMetaSerialization()[static_cast<size_t>(type)];
  const auto others =
      backend.value_or(std::pair<torch::jit::BackendMetaPtr, torch::jit::BackendMetaPtr>(
          [](auto&...) {}, [](auto&...) {}));
  backend.emplace(
      [save = others.first](const at::Tensor& tensor, auto& metadata) {
        TORCH_CHECK(!IsStreamed(tensor), "a streamed weight or its gradient (", tensor.toString(),
                    tensor.sizes(),
                    ") cannot be saved from the device: call torch::save within "
                    "WeightOffloader::WithParametersOnHost, or save host_parameters()[i].grad()");
        save(tensor, metadata);
      },
      others.second);
}

void RegisterOnce(c10::DeviceType type) {
  static std::array<std::once_flag, at::COMPILE_TIME_MAX_DEVICE_TYPES> refuses;
  std::call_once(refuses[static_cast<size_t>(type)], &RefuseToSave, type);
  static const torch::Library* const library = [] {
    auto* all = new torch::Library(torch::Library::IMPL, "_", kStreamedKey, __FILE__, __LINE__);
    all->fallback(torch::CppFunction::makeFromBoxedFunction<&RunWithStreamed>());
    return all;
  }();
  (void)library;
}

}  // namespace

ResidencyKeeper::~ResidencyKeeper() {
  for (const auto& storage : storages_) {
    StreamedTags::OfProcess().Forget(storage._unsafe_get_target());
  }
}

c10::DataPtr StreamedData(void* data, std::shared_ptr<ResidencyKeeper> keeper, c10::Device device) {
  return {data, new KeeperReference(std::move(keeper)), &DeleteKeeperReference, device};
}

void MakeStreamed(c10::Storage& storage, const std::shared_ptr<ResidencyKeeper>& keeper,
                  uint32_t unit) {
  storage.set_data_ptr_noswap(StreamedData(nullptr, keeper, storage.device()));
  keeper->storages_.push_back(storage.getWeakStorageImpl());
  StreamedTags::OfProcess().Add(storage.unsafeGetStorageImpl(), {keeper.get(), unit});
}

at::Tensor MakeStreamedTensor(const at::Tensor& like, int64_t storage_offset,
                              c10::Storage storage) {
  RegisterOnce(storage.device_type());
  const c10::DispatchKey plain =
      at::TensorOptions(storage.device()).dtype(like.dtype()).computeDispatchKey();
  const c10::DispatchKeySet keys({plain, kStreamedKey});
  at::Tensor tensor =
      at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), storage_offset);
  return tensor;
}

bool IsStreamed(const at::TensorBase& tensor) { return tensor.key_set().has(kStreamedKey); }

const ResidencyKeeper* KeeperOf(const at::Tensor& tensor) {
  return tensor.defined() && IsStreamed(tensor) ? StreamedTags::OfProcess().Find(tensor).keeper
                                                : nullptr;
}

}  // namespace pinion
