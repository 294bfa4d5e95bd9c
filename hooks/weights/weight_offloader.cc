#include "pinion/hooks/weights/weight_offloader.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <exception>
#include <string>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/environment.h"
#include "pinion/hooks/tier/torch_tier.h"
#include "pinion/hooks/weights/master_watch.h"
#include "pinion/hooks/weights/streamed_tensor.h"
#include "pinion/hooks/weights/weight_masters.h"

namespace pinion {
namespace {

constexpr char kStep[] = "WeightOffloader::Step";
constexpr char kWithParametersOnHost[] = "WeightOffloader::WithParametersOnHost";

// Returns weak references to the module, or to its children if no shared_ptr owns the module, with
// name prefixes.
std::vector<std::pair<std::string, std::weak_ptr<torch::nn::Module>>> RootsOf(
    torch::nn::Module& module) {
  std::vector<std::pair<std::string, std::weak_ptr<torch::nn::Module>>> roots;
  if (!module.weak_from_this().expired()) {
    roots.emplace_back("", module.weak_from_this());
    return roots;
  }
  for (const auto& child : module.named_children()) {
    roots.emplace_back(child.key() + ".", child.value());
  }
  return roots;
}

}  // namespace

absl::StatusOr<std::unique_ptr<WeightOffloader>> WeightOffloader::Attach(
    torch::nn::Module& module, c10::Device device, const DeviceBackend& backend,
    const WeightOptions& options) {
  if (SwitchedOnByEnvironment("PINION_DISABLE")) {
    return absl::FailedPreconditionError(
        "weights cannot be streamed with PINION_DISABLE=1 in the environment: unset it");
  }
  PINION_ASSIGN_OR_RETURN(const c10::DeviceType type, DeviceTypeOf(backend.type_name));
  WarnOfSwitches("streamed weights", backend.type_name, /*verifies=*/false);
  if (device.type() != type) {
    return absl::InvalidArgumentError(absl::StrCat("the backend is for \"", backend.type_name,
                                                   "\", and the device is ", device.str()));
  }
  PINION_ASSIGN_OR_RETURN(std::shared_ptr<HostTier> host,
                          TorchHostTier(options.tier, backend, type));
  if (options.memory_target_bytes > 0 && !TellsAllocatedBytes(type)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "WeightOptions::memory_target_bytes is for an allocator that tells what it has "
        "given out, and that of ",
        backend.type_name, " does not: give window_bytes"));
  }
  if (!device.has_index()) device = CurrentStream(device).device();
  std::vector<WeightUnit> units = WeightUnitsOf(module);
  if (units.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", module.name(), "\" has no parameters to stream"));
  }
  PINION_RETURN_IF_ERROR(CheckWeights(units, device));
  PINION_ASSIGN_OR_RETURN(std::shared_ptr<DeviceTier> tier, host->ForDevice(device.index()));
  PINION_RETURN_IF_ERROR(CheckHasOwnMemory(*tier));

  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  std::vector<WeightMaster> masters;
  std::vector<std::pair<at::Tensor, at::Tensor>> moved;
  try {
    PINION_ASSIGN_OR_RETURN(masters, FillMasters(*tier, units, device));
    moved = CopiesOfTheRest(module, units, device);
  } catch (const c10::Error& error) {
    return absl::ResourceExhaustedError(absl::StrCat("copying the weights of \"", module.name(),
                                                     "\": ", error.what_without_backtrace()));
  }
  PINION_ASSIGN_OR_RETURN(const WeightRoom room, RoomFor(masters, options));

  // Nothing fails below.
  std::vector<UnitParcel> parcels;
  for (const WeightMaster& master : masters) parcels.push_back(master.parcel);
  std::unique_ptr<WeightOffloader> offloader(new WeightOffloader());
  offloader->weights_ =
      std::make_shared<DeviceWeights>(device, host, tier, room, std::move(parcels));
  tier->share()->Register(offloader->weights_);
  absl::flat_hash_map<const c10::TensorImpl*, at::Tensor> host_of;
  for (uint32_t index = 0; index < masters.size(); ++index) {
    WeightMaster& master = masters[index];
    for (c10::Storage& storage : master.streamed) {
      MakeStreamed(storage, offloader->weights_, index);
    }
    for (size_t weight = 0; weight < master.unit.weights.size(); ++weight) {
      auto& [name, tensor] = master.unit.weights[weight];
      const at::Tensor& on_host = master.host[weight];
      const std::shared_ptr<MasterWatch>& watch = master.parcel.masters[weight];
      const c10::Storage& storage = master.streamed[master.piece_of[weight]];
      const c10::weak_intrusive_ptr<c10::TensorImpl> weak(tensor.getIntrusivePtr());
      host_of[tensor.unsafeGetTensorImpl()] = on_host;
      offloader->all_.push_back({name, weak, storage.getWeakStorageImpl(), on_host, watch, index});
      tensor.set_data(MakeStreamedTensor(tensor, tensor.storage_offset(), storage));
    }
  }
  offloader->gradients_ = std::make_shared<HostGradients>(tier, offloader->all_, room.leaving_units,
                                                          options.gradients_stay);
  offloader->gradients_->Begin();
  for (auto& [tensor, on_device] : moved) tensor.set_data(on_device);
  for (const at::Tensor& parameter : module.parameters()) {
    const auto found = host_of.find(parameter.unsafeGetTensorImpl());
    offloader->host_parameters_.push_back(found == host_of.end() ? parameter : found->second);
    offloader->parameters_.emplace_back(parameter.getIntrusivePtr());
  }
  offloader->roots_ = RootsOf(module);
  return offloader;
}

void WeightOffloader::CheckSameParameters() const {
  absl::flat_hash_set<const c10::TensorImpl*> known;
  for (const auto& parameter : parameters_) known.insert(parameter._unsafe_get_target());
  for (const auto& [name, weak] : roots_) {
    const std::shared_ptr<torch::nn::Module> root = weak.lock();
    if (root == nullptr) continue;
    for (const auto& parameter : root->named_parameters()) {
      TORCH_CHECK(known.contains(parameter.value().unsafeGetTensorImpl()), "the parameter ", name,
                  parameter.key(),
                  " came to the module after WeightOffloader::Attach, and no host copy follows it: "
                  "register all parameters before");
    }
  }
}

void WeightOffloader::WaitForGradientsOf(const char* call) {
  TORCH_CHECK(!on_host_, call, " was called within ", kWithParametersOnHost, ": call it after ",
              kWithParametersOnHost, " has returned");
  CheckSameParameters();
  for (const StreamedWeight& weight : all_) {
    const auto impl = weight.parameter.lock();
    TORCH_CHECK(
        !impl || (impl->key_set().has(kStreamedKey) &&
                  impl->storage().unsafeGetStorageImpl() == weight.storage._unsafe_get_target()),
        "the parameter ", weight.name,
        " was given other memory since WeightOffloader::Attach, by set_data() or by loading "
        "the module: do that within WithParametersOnHost, or copy into host_parameters() within "
        "Step");
  }
  gradients_->Follow();
}

void WeightOffloader::WithParametersOnHost(const std::function<void()>& work) {
  TORCH_CHECK(work != nullptr, "the work of WithParametersOnHost is empty: give a function to run");
  WaitForGradientsOf(kWithParametersOnHost);
  weights_->Pause(kWithParametersOnHost);
  // The parameters that still exist, and the tensors that they become again.
  std::vector<at::Tensor> parameters(all_.size());
  std::vector<at::Tensor> streamed(all_.size());
  const absl::Cleanup back = [&] {
    on_host_ = false;
    const c10::InferenceMode normal(false);
    const at::NoGradGuard no_grad;
    std::vector<uint32_t> units;
    for (size_t i = 0; i < all_.size(); ++i) {
      units.push_back(all_[i].unit);
      all_[i].watch->Accept();
      if (all_[i].master.grad().defined()) all_[i].watch->NoteGradient();
      if (!streamed[i].defined()) continue;
      try {
        parameters[i].set_data(streamed[i]);
        parameters[i].unsafeGetTensorImpl()->bump_version();
      } catch (const std::exception& error) {
        PINION_LOG(kError) << all_[i].name << " is not streamed after this error: " << error.what();
      }
    }
    weights_->Resume(units);
  };
  on_host_ = true;
  {
    // Tensors made in inference mode could not be trained later.
    const c10::InferenceMode normal(false);
    const at::NoGradGuard no_grad;
    const c10::impl::ExcludeDispatchKeyGuard unreported(kStreamedKey);
    for (size_t i = 0; i < all_.size(); ++i) {
      at::Tensor& tensor = parameters[i];
      tensor = at::Tensor(all_[i].parameter.lock());
      if (!tensor.defined()) continue;
      streamed[i] = MakeStreamedTensor(tensor, tensor.storage_offset(), tensor.storage());
      tensor.set_data(all_[i].master.detach());
    }
  }
  work();
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < all_.size(); ++i) {
    const StreamedWeight& weight = all_[i];
    const at::Tensor& tensor = parameters[i];
    if (!tensor.defined()) continue;
    TORCH_CHECK(tensor.sizes() == streamed[i].sizes() && tensor.dtype() == streamed[i].dtype(),
                "the parameter ", weight.name, " was given ", tensor.toString(), tensor.sizes(),
                " and was ", streamed[i].dtype().name(), streamed[i].sizes(),
                ": a streamed weight keeps its type and shape");
    const at::Tensor on_host = weight.master.detach();
    // A different view of the same memory, such as a transpose, has other values.
    const bool is_same = tensor.is_alias_of(on_host) &&
                         tensor.storage_offset() == on_host.storage_offset() &&
                         tensor.strides() == on_host.strides();
    if (!is_same) on_host.copy_(tensor.detach().clone());
  }
}

void WeightOffloader::Step(const std::function<void()>& step) {
  TORCH_CHECK(step != nullptr, "the step of Step is empty: give a function that changes weights");
  WaitForGradientsOf(kStep);
  weights_->Pause(kStep);
  // Optimizers write through data(), without a new version, to every weight with a gradient.
  std::vector<bool> may_change;
  for (const StreamedWeight& weight : all_) {
    may_change.push_back(weight.master.requires_grad() || weight.master.grad().defined());
  }
  {
    const absl::Cleanup resume = [this, &may_change] {
      std::vector<uint32_t> changed;
      for (size_t i = 0; i < all_.size(); ++i) {
        const StreamedWeight& weight = all_[i];
        if (!may_change[i] && !weight.watch->HasChanged()) continue;
        weight.watch->Accept();
        changed.push_back(weight.unit);
        if (const auto impl = weight.parameter.lock()) impl->bump_version();
      }
      weights_->Resume(changed);
    };
    step();
  }
  weights_->FetchExpected();
}

void WeightOffloader::WaitForGradients() {
  WaitForGradientsOf("WeightOffloader::WaitForGradients");
}

double WeightOffloader::ClipGradNorm(double max_norm) {
  TORCH_CHECK(max_norm >= 0, "ClipGradNorm to a norm of ", max_norm,
              ": it must be at least 0 (infinity: the norm alone)");
  WaitForGradientsOf("WeightOffloader::ClipGradNorm");
  return gradients_->ClipNorm(max_norm);
}

void WeightOffloader::ZeroGrad() { gradients_->Zero(); }

WeightStats WeightOffloader::GetStats() const {
  WeightStats stats = weights_->GetStats();
  stats.gradient_bytes = gradients_->left_bytes();
  return stats;
}

}  // namespace pinion
