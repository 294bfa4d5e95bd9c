#include "pinion/hooks/weights/weight_masters.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/parameterlist.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/engine/link/packing.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/weights/master_watch.h"
#include "pinion/hooks/weights/streamed_tensor.h"
#include "pinion/hooks/weights/weight_offloader.h"

namespace pinion {
namespace {

constexpr uint64_t kMinBufferBytes = 1 << 20;

// Whether a buffer is a running statistic of normalisation, which each training forward changes.
bool IsStatistic(const std::string& key) {
  return absl::EndsWith(key, "running_mean") || absl::EndsWith(key, "running_var");
}

class UnitFinder {
 public:
  void Visit(const torch::nn::Module& module, const std::string& name) {
    if (module.as<torch::nn::ParameterListImpl>() != nullptr) {
      for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
        const std::string key = NameIn(name, parameter.key());
        WeightUnit unit = {
            .name = key, .requires_grad = parameter.value().requires_grad(), .weights = {}};
        Add(unit, key, parameter.value());
        Keep(std::move(unit));
      }
      return;
    }
    AddLayer(module, name, /*recurse=*/false);
    const bool is_row = module.as<torch::nn::SequentialImpl>() != nullptr ||
                        module.as<torch::nn::ModuleListImpl>() != nullptr;
    for (const auto& child : module.named_children()) {
      const std::string child_name = NameIn(name, child.key());
      if (is_row) {
        AddLayer(*child.value(), child_name, /*recurse=*/true);
      } else {
        Visit(*child.value(), child_name);
      }
    }
  }
  std::vector<WeightUnit> Take() { return std::move(units_); }

 private:
  static std::string NameIn(const std::string& parent, const std::string& key) {
    return parent.empty() ? key : parent + "." + key;
  }
  void Add(WeightUnit& unit, const std::string& name, const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.numel() == 0) return;
    if (!seen_.insert(tensor.unsafeGetTensorImpl()).second) return;
    unit.weights.push_back({name, tensor});
  }
  void Keep(WeightUnit unit) {
    if (!unit.weights.empty()) units_.push_back(std::move(unit));
  }
  void AddLayer(const torch::nn::Module& module, const std::string& name, bool recurse) {
    WeightUnit trained = {.name = name, .requires_grad = true, .weights = {}};
    WeightUnit frozen = {.name = name, .requires_grad = false, .weights = {}};
    for (const auto& parameter : module.named_parameters(recurse)) {
      WeightUnit& unit = parameter.value().requires_grad() ? trained : frozen;
      Add(unit, NameIn(name, parameter.key()), parameter.value());
    }
    for (const auto& buffer : module.named_buffers(recurse)) {
      if (buffer.value().nbytes() < kMinBufferBytes || IsStatistic(buffer.key())) continue;
      Add(frozen, NameIn(name, buffer.key()), buffer.value());
    }
    Keep(std::move(trained));
    Keep(std::move(frozen));
  }

  std::vector<WeightUnit> units_;
  absl::flat_hash_set<const c10::TensorImpl*> seen_;
};

absl::Status CheckWeight(const NamedWeight& weight, c10::Device device) {
  const at::Tensor& tensor = weight.tensor;
  if (tensor.layout() != at::kStrided) {
    return absl::InvalidArgumentError(
        absl::StrCat(weight.name, " is not strided: streamed weights are"));
  }
  if (IsStreamed(tensor)) {
    return absl::FailedPreconditionError(
        absl::StrCat(weight.name, " is streamed already, by another WeightOffloader"));
  }
  if (!tensor.device().is_cpu() && tensor.device() != device) {
    return absl::InvalidArgumentError(absl::StrCat(
        weight.name, " is on ", tensor.device().str(), " and was to be streamed to ", device.str(),
        ": attach the parts of a model that are on several devices one by one"));
  }
  return absl::OkStatus();
}

// Copies the tensor's whole storage to `place`.
void CopyStorage(const at::Tensor& tensor, char* place) {
  const auto size_bytes = static_cast<int64_t>(tensor.storage().nbytes());
  const at::Tensor bytes = at::empty({0}, tensor.options().dtype(at::kByte))
                               .set_(tensor.storage(), 0, {size_bytes}, {1});
  at::from_blob(place, {size_bytes}, at::kByte).copy_(bytes);
}

// Returns the host copy of `like` in a storage that begins at `piece`.
at::Tensor HostTensor(const at::Tensor& like, char* piece, std::shared_ptr<HostBuffer> owner) {
  const int64_t offset_bytes = like.storage_offset() * static_cast<int64_t>(like.itemsize());
  at::Tensor tensor = at::from_blob(
      piece + offset_bytes, like.sizes(), like.strides(), [owner = std::move(owner)](void*) {},
      like.scalar_type());
  tensor.set_requires_grad(like.requires_grad());
  if (like.grad_dtype() != tensor.grad_dtype()) tensor.set_grad_dtype(like.grad_dtype());
  if (like.grad().defined()) tensor.mutable_grad() = like.grad().cpu();
  return tensor;
}

absl::StatusOr<WeightMaster> FillMaster(DeviceTier& tier, const WeightUnit& unit,
                                        c10::Device device) {
  WeightMaster master = {.unit = unit, .parcel = {}, .streamed = {}, .piece_of = {}, .host = {}};
  UnitParcel& parcel = master.parcel;
  parcel.name = unit.name;
  std::vector<at::Tensor> first_of_piece;
  absl::flat_hash_map<const c10::StorageImpl*, size_t> known;
  uint64_t size_bytes = 0;
  for (const auto& [name, tensor] : unit.weights) {
    const c10::Storage& storage = tensor.storage();
    const auto [entry, is_new] =
        known.try_emplace(storage.unsafeGetStorageImpl(), parcel.pieces.size());
    master.piece_of.push_back(entry->second);
    if (!is_new) continue;
    c10::Storage streamed(c10::Storage::use_byte_size_t(), storage.nbytes(),
                          c10::DataPtr(nullptr, device), c10::GetAllocator(device.type()),
                          /*resizable=*/false);
    parcel.pieces.push_back({name, streamed.getWeakStorageImpl(), size_bytes});
    master.streamed.push_back(std::move(streamed));
    first_of_piece.push_back(tensor);
    size_bytes = AlignUp(size_bytes + storage.nbytes(), kPackAlignmentBytes);
  }
  const StreamHandle stream = NativeStream(CurrentStream(device));
  PINION_ASSIGN_OR_RETURN(parcel.parcel, tier.NewParcel<WeightParcel>(size_bytes, stream));
  const std::shared_ptr<HostBuffer> filled = parcel.parcel->ToWrite();
  for (size_t i = 0; i < parcel.pieces.size(); ++i) {
    CopyStorage(first_of_piece[i],
                static_cast<char*>(filled->data()) + parcel.pieces[i].offset_bytes);
  }
  parcel.parcel->FillOnHost();
  PINION_ASSIGN_OR_RETURN(const std::shared_ptr<HostBuffer> buffer,
                          parcel.parcel->ViewOnHost(absl::InfiniteDuration()));
  for (size_t i = 0; i < unit.weights.size(); ++i) {
    const WeightPiece& piece = parcel.pieces[master.piece_of[i]];
    const auto& [name, tensor] = unit.weights[i];
    master.host.push_back(
        HostTensor(tensor, static_cast<char*>(buffer->data()) + piece.offset_bytes, buffer));
    parcel.masters.push_back(std::make_shared<MasterWatch>(name, master.host[i]));
  }
  return master;
}

}  // namespace

std::vector<WeightUnit> WeightUnitsOf(const torch::nn::Module& module) {
  UnitFinder finder;
  finder.Visit(module, "");
  return finder.Take();
}

absl::Status CheckWeights(const std::vector<WeightUnit>& units, c10::Device device) {
  struct Owner {
    const WeightUnit* unit;
    const NamedWeight* weight;
  };
  absl::flat_hash_map<const c10::StorageImpl*, Owner> owners;
  for (const WeightUnit& unit : units) {
    for (const NamedWeight& weight : unit.weights) {
      PINION_RETURN_IF_ERROR(CheckWeight(weight, device));
      const auto [owner, is_new] =
          owners.try_emplace(weight.tensor.storage().unsafeGetStorageImpl(), Owner{&unit, &weight});
      if (is_new || owner->second.unit == &unit) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          weight.name, " shares its storage with ", owner->second.weight->name,
          ", which belongs to another layer, or is frozen where this is trained: give each a "
          "storage of its own (set_data(clone())), or tie weights by registering one tensor "
          "twice"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<WeightMaster>> FillMasters(DeviceTier& tier,
                                                      const std::vector<WeightUnit>& units,
                                                      c10::Device device) {
  std::vector<WeightMaster> masters;
  for (const WeightUnit& unit : units) {
    PINION_ASSIGN_OR_RETURN(WeightMaster master, FillMaster(tier, unit, device));
    masters.push_back(std::move(master));
  }
  return masters;
}

std::vector<std::pair<at::Tensor, at::Tensor>> CopiesOfTheRest(const torch::nn::Module& module,
                                                               const std::vector<WeightUnit>& units,
                                                               c10::Device device) {
  absl::flat_hash_set<const c10::TensorImpl*> streamed;
  for (const WeightUnit& unit : units) {
    for (const auto& [name, tensor] : unit.weights) streamed.insert(tensor.unsafeGetTensorImpl());
  }
  std::vector<std::pair<at::Tensor, at::Tensor>> moved;
  for (const std::vector<at::Tensor>& tensors : {module.buffers(), module.parameters()}) {
    for (const at::Tensor& tensor : tensors) {
      const bool stays = !tensor.defined() || tensor.device() == device ||
                         streamed.contains(tensor.unsafeGetTensorImpl());
      if (!stays) moved.emplace_back(tensor, tensor.detach().to(device));
    }
  }
  return moved;
}

absl::StatusOr<WeightRoom> RoomFor(const std::vector<WeightMaster>& masters,
                                   const WeightOptions& options) {
  if (options.window_bytes > 0 && options.memory_target_bytes > 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("WeightOptions::window_bytes is ", options.window_bytes,
                     " and memory_target_bytes is ", options.memory_target_bytes,
                     ": a target makes the window as large as there is room, so give one"));
  }
  const auto largest = std::max_element(masters.begin(), masters.end(),
                                        [](const WeightMaster& a, const WeightMaster& b) {
                                          return a.parcel.size_bytes() < b.parcel.size_bytes();
                                        });
  const uint64_t least_bytes = largest->parcel.size_bytes();
  uint64_t two_largest_bytes = least_bytes;
  for (const WeightMaster& master : masters) {
    if (&master == &*largest) continue;
    two_largest_bytes = std::max(two_largest_bytes, least_bytes + master.parcel.size_bytes());
  }
  const bool has_target = options.memory_target_bytes > 0;
  const uint64_t asked_bytes = has_target ? options.memory_target_bytes : options.window_bytes;
  if (asked_bytes > 0 && asked_bytes < least_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("WeightOptions::", has_target ? "memory_target_bytes" : "window_bytes", " is ",
                     asked_bytes, ", and the layer \"", largest->parcel.name, "\" alone needs ",
                     least_bytes, ": make it larger, or cut the layer into several modules"));
  }
  if (has_target) {
    return WeightRoom{.window_bytes = 0,
                      .target_bytes = options.memory_target_bytes,
                      .wanted = {least_bytes, two_largest_bytes},
                      .two_largest_bytes = two_largest_bytes};
  }
  const uint64_t window_bytes = asked_bytes > 0 ? asked_bytes : two_largest_bytes;
  return WeightRoom{.window_bytes = window_bytes,
                    .wanted = {window_bytes, window_bytes},
                    .leaving_units = window_bytes > two_largest_bytes ? size_t{2} : size_t{1},
                    .two_largest_bytes = two_largest_bytes};
}

}  // namespace pinion
