#include "pinion/hooks/activations/offload_session.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/schedule/offload_schedule.h"
#include "pinion/engine/tier/device_tier.h"
#include "pinion/engine/tier/host_tier.h"
#include "pinion/hooks/activations/cast_sources.h"
#include "pinion/hooks/activations/device_offloader.h"
#include "pinion/hooks/activations/offload_stats_recorder.h"
#include "pinion/hooks/activations/scope_packer.h"
#include "pinion/hooks/autograd/kept_tensor.h"
#include "pinion/hooks/autograd/memory_observer.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/environment.h"
#include "pinion/hooks/plan/offload_policy.h"
#include "pinion/hooks/plan/parameter_cast.h"
#include "pinion/hooks/tier/torch_tier.h"

namespace pinion {
namespace {

// Sets a flag that threads set often, without taking its cache line from them each time.
void Raise(std::atomic<bool>& flag) {
  if (!flag.load(std::memory_order_relaxed)) flag.store(true, std::memory_order_relaxed);
}

class SessionImpl : public OffloadSession, public PackTarget, public MemoryObserver {
 public:
  // `tier` is null if the session is not enabled.
  SessionImpl(const OffloadOptions& options, c10::DeviceType device_type,
              std::shared_ptr<HostTier> tier)
      : options_(options), device_type_(device_type), tier_(std::move(tier)) {}

  const OffloadOptions& options() const override { return options_; }
  ~SessionImpl() override { IgnoreBackwards(*this); }

  OffloadStats GetStats() const override {
    OffloadStats stats = stats_->Get();
    for (const auto& offloader : Offloaders()) {
      if (offloader->learner() == nullptr) continue;
      const PlanMeter::Overshoot overshoot = offloader->learner()->overshoot();
      stats.steps_over_target += overshoot.steps;
      stats.most_bytes_over_target = std::max(stats.most_bytes_over_target, overshoot.most_bytes);
    }
    return stats;
  }

  AllocatorStats GetAllocatorStats() const override {
    return tier_ == nullptr ? AllocatorStats() : tier_->pool().GetStats();
  }

  EngineStats GetEngineStats(int device_index) const override {
    const std::shared_ptr<DeviceOffloader> offloader = FindOffloader(device_index);
    if (offloader == nullptr) return EngineStats();
    offloader->engine().Poll();
    return offloader->engine().GetStats();
  }

  std::optional<LinkCalibration> GetLink(int device_index) const override {
    const std::shared_ptr<DeviceOffloader> offloader = FindOffloader(device_index);
    if (offloader == nullptr) return std::nullopt;
    return offloader->link();
  }

  std::vector<LiveTensor> LiveTensors() const override {
    std::vector<LiveTensor> tensors;
    for (const auto& offloader : Offloaders()) offloader->AppendLive(tensors);
    return tensors;
  }

  std::vector<PlannedStep> PlannedSteps(int device_index) const override {
    const std::shared_ptr<DeviceOffloader> offloader = FindOffloader(device_index);
    if (offloader == nullptr || offloader->learner() == nullptr) return {};
    return offloader->learner()->PlannedSteps();
  }

  absl::Status Reserve(int device_index, uint64_t size_bytes) override {
    PINION_ASSIGN_OR_RETURN(const c10::Device device, NumberedDevice(device_type_, device_index));
    if (tier_ == nullptr) return absl::OkStatus();  // nothing will be offloaded
    if (FindOffloader(device_index) == nullptr) {
      const absl::Status set_up = SetUp(device).status();
      if (absl::IsUnimplemented(set_up)) return absl::OkStatus();  // nothing here either
      PINION_RETURN_IF_ERROR(set_up);
    }
    return tier_->pool().Reserve(size_bytes);
  }

  void FreeDeviceMemory(int device_index) override {
    if (const auto offloader = FindOffloader(device_index)) offloader->FreeDeviceMemory();
  }

  absl::StatusOr<uint64_t> Trim(uint64_t keep_bytes) override {
    return tier_ == nullptr ? 0 : tier_->pool().Trim(keep_bytes);
  }

  std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace& place,
                                    const ScopeModule& module, PackScope& scope) override;

  std::optional<uint32_t> KeepSegment(const SegmentBegin& segment, ScopeId scope) override {
    const bool is_planned = options_.memory_target_bytes != OffloadOptions::kNoTarget;
    if (!is_planned || segment.device.type() != device_type_) return std::nullopt;
    // A failure is reported when the segment's inputs are saved.
    const absl::StatusOr<std::shared_ptr<DeviceOffloader>> offloader = OffloaderFor(segment.device);
    if (!offloader.ok()) return std::nullopt;
    return (*offloader)->learner()->KeepSegment(segment, scope);
  }

  void EndScope(const PackScope& scope) override {
    {
      MutexLock lock(mu_);
      std::erase_if(failed_, [](const auto& one) { return !absl::IsUnimplemented(one.second); });
    }
    for (const auto& offloader : Offloaders()) offloader->EndScope(scope.id);
    const bool all_elsewhere = scope.saved_unsupported && !scope.saved_supported;
    if (all_elsewhere && IsFirstToldOf(c10::Device(device_type_))) WarnOfNoTensorOn(device_type_);
  }

  CastNotes NoteCasts() override {
    return options_.cast_weights_again ? casts_.Note() : CastNotes();
  }

  std::shared_ptr<MemoryObserver> Observer() override;

  void OnDeviceBytes(c10::Device device, int64_t allocated_bytes, int64_t added_bytes,
                     const void* freed) override {
    if (device.type() != device_type_ || !device.has_index()) return;
    DeviceOffloader* const offloader = known_[device.index()].load(std::memory_order_acquire);
    if (offloader == nullptr) return;
    offloader->learner()->OnDeviceBytes(allocated_bytes, added_bytes, freed);
  }
  void OnUnobserved() override {
    for (const std::atomic<DeviceOffloader*>& known : known_) {
      DeviceOffloader* const offloader = known.load(std::memory_order_acquire);
      if (offloader != nullptr) offloader->learner()->OnUnobserved();
    }
  }
  void OnAccumulate(const at::Tensor& leaf) override {
    if (leaf.device().type() != device_type_) return;
    DeviceOffloader* const offloader =
        known_[leaf.device().index()].load(std::memory_order_acquire);
    if (offloader != nullptr) offloader->learner()->OnAccumulate(leaf);
  }

 private:
  // Without this check, a session for another backend would silently do nothing.
  void RefuseOtherAccelerator(c10::Device device) const {
    if (device.type() == device_type_ || device.is_cpu() || device.is_meta()) return;
    ThrowIfError(
        absl::InvalidArgumentError(absl::StrCat(
            "the session was made for \"", c10::DeviceTypeName(device_type_, /*lower_case=*/true),
            "\", and the tensor is on ", device.str(),
            ": create the session with the backend of that device")),
        "saving a tensor in an OffloadScope");
  }

  void CountKept(uint64_t OffloadStats::*reason, c10::Device device) {
    stats_->Update([reason](OffloadStats& stats) { ++(stats.*reason); });
    if (options_.eviction_window_tensors != OffloadOptions::kNoTensorWindow &&
        device.type() == device_type_) {
      // Without an offloader no window counts tensors.
      if (const auto offloader = FindOffloader(device.index())) offloader->CountKept();
    }
  }
  std::unique_ptr<SavedTensor> Keep(const at::Tensor& tensor, uint64_t OffloadStats::*reason) {
    CountKept(reason, tensor.device());
    return KeepTensor(tensor);
  }

  std::shared_ptr<DeviceOffloader> FindOffloader(int device_index) const {
    MutexLock lock(mu_);
    const auto found = offloaders_.find(device_index);
    return found == offloaders_.end() ? nullptr : found->second;
  }

  std::vector<std::shared_ptr<DeviceOffloader>> Offloaders() const {
    MutexLock lock(mu_);
    std::vector<std::shared_ptr<DeviceOffloader>> offloaders;
    for (const auto& [index, offloader] : offloaders_) offloaders.push_back(offloader);
    return offloaders;
  }

  // Returns the device's offloader, set up at its first use. A failure is not retried in the scope.
  absl::StatusOr<std::shared_ptr<DeviceOffloader>> OffloaderFor(c10::Device device);
  absl::StatusOr<std::shared_ptr<DeviceOffloader>> SetUp(c10::Device device);
  // Returns whether nothing about the device was logged. -1 stands for the lack of any device.
  bool IsFirstToldOf(c10::Device device);

  const OffloadOptions options_;
  const c10::DeviceType device_type_;
  const std::shared_ptr<HostTier> tier_;
  CastSources casts_;
  const std::shared_ptr<OffloadStatsRecorder> stats_ = std::make_shared<OffloadStatsRecorder>();

  // The offloaders by device index, to be read without the lock.
  std::array<std::atomic<DeviceOffloader*>, 128> known_ = {};
  mutable Mutex mu_;
  std::map<int, std::shared_ptr<DeviceOffloader>> offloaders_ ABSL_GUARDED_BY(mu_);
  std::map<int, absl::Status> failed_ ABSL_GUARDED_BY(mu_);  // by device; only some are permanent
  std::set<int> told_ ABSL_GUARDED_BY(mu_);                  // devices whose failure was logged
};

std::unique_ptr<SavedTensor> SessionImpl::Pack(const at::Tensor& tensor, const GraphPlace& place,
                                               const ScopeModule& module, PackScope& scope) {
  HostTimer timer(*stats_);
  timer.Count(&OffloadStats::packed);
  const c10::Device device = tensor.device();
  // Recomputed tensors are needed at once, those that a double backward saves soon.
  if (CurrentBackward() != -1) return Keep(tensor, &OffloadStats::kept_in_backward);
  const ParameterStorages* const parameters =
      module.parameters.has_value() ? &*module.parameters : nullptr;
  const TensorKind kind =
      ClassifyTensor(tensor, device_type_, options_.min_offload_bytes, parameters);
  if (kind == TensorKind::kUnsupported) {
    // A wrapper may have a device without memory there, as fake tensors do.
    if (IsPlainTensor(tensor)) RefuseOtherAccelerator(device);
    if (tensor.dim() > 0) Raise(scope.saved_unsupported);
    return Keep(tensor, &OffloadStats::kept_unsupported);
  }
  Raise(scope.saved_supported);
  const auto reason = kind == TensorKind::kParameter ? &OffloadStats::kept_parameter
                      : kind == TensorKind::kSmall   ? &OffloadStats::kept_small
                                                     : &OffloadStats::kept_head;
  // Also for small tensors: autocast's cast of a small weight identifies a head's node.
  if (module.heads != nullptr) {
    HeadNodes::Save save = module.heads->OnSave(tensor, place.node);
    if (save.is_parameter) {
      if (const auto offloader = FindOffloader(device.index())) offloader->KeepSavedBy(place.node);
    }
    if (save.is_heads) {
      CountKept(reason, device);
      return KeepWith(tensor, std::move(save.earlier));
    }
  }
  if (kind == TensorKind::kParameter || kind == TensorKind::kSmall) return Keep(tensor, reason);
  DeviceOffloader* offloader = known_[device.index()].load(std::memory_order_acquire);
  if (offloader == nullptr) {
    const absl::StatusOr<std::shared_ptr<DeviceOffloader>> made = OffloaderFor(device);
    if (absl::IsInvalidArgument(made.status()) || absl::IsNotFound(made.status())) {
      ThrowIfError(made.status(), "setting up offload for a device");
    }
    if (!made.ok()) {
      if (IsFirstToldOf(device)) {
        PINION_LOG(kWarning) << "saved tensors stay on " << device.str()
                             << ", which cannot be set up: " << made.status();
      }
      return Keep(tensor, &OffloadStats::kept_copy_failed);
    }
    offloader = made->get();
  }
  std::unique_ptr<const ParameterCast> cast;
  if (options_.cast_weights_again) cast = casts_.Find(tensor, scope.casts, scope.begin);
  const bool is_leaf = kind == TensorKind::kHeldLeaf;
  std::unique_ptr<SavedTensor> saved =
      offloader->Pack(tensor, place, is_leaf, std::move(cast), scope);
  return saved == nullptr ? KeepTensor(tensor) : std::move(saved);
}

std::shared_ptr<MemoryObserver> SessionImpl::Observer() {
  if (options_.memory_target_bytes == OffloadOptions::kNoTarget) return nullptr;
  const std::vector<std::shared_ptr<DeviceOffloader>> offloaders = Offloaders();
  const bool is_curious = offloaders.empty() ||
                          std::any_of(offloaders.begin(), offloaders.end(),
                                      [](const auto& one) { return one->learner()->IsCurious(); });
  const auto self = std::static_pointer_cast<SessionImpl>(shared_from_this());
  if (is_curious) {
    ObserveBackwards(self);
    return self;
  }
  IgnoreBackwards(*this);
  return nullptr;
}

absl::StatusOr<std::shared_ptr<DeviceOffloader>> SessionImpl::OffloaderFor(c10::Device device) {
  {
    MutexLock lock(mu_);
    if (const auto found = offloaders_.find(device.index()); found != offloaders_.end()) {
      return found->second;
    }
    if (const auto found = failed_.find(device.index()); found != failed_.end()) {
      return found->second;
    }
  }
  absl::StatusOr<std::shared_ptr<DeviceOffloader>> offloader = SetUp(device);
  if (!offloader.ok()) {
    MutexLock lock(mu_);
    failed_.try_emplace(device.index(), offloader.status());
  }
  return offloader;
}

bool SessionImpl::IsFirstToldOf(c10::Device device) {
  MutexLock lock(mu_);
  return told_.insert(device.index()).second;
}

absl::StatusOr<std::shared_ptr<DeviceOffloader>> SessionImpl::SetUp(c10::Device device) {
  // Not under the lock, because this calls the device. If two threads do, the first one wins.
  PINION_ASSIGN_OR_RETURN(std::shared_ptr<DeviceTier> tier, tier_->ForDevice(device.index()));
  PINION_RETURN_IF_ERROR(CheckHasOwnMemory(*tier));
  // Without overlap nothing is planned, so the link need not be measured.
  const LinkCalibration link = options_.link.has_value() ? *options_.link
                               : options_.overlap ? tier->Link(NativeStream(CurrentStream(device)))
                                                  : AssumedLink();
  MutexLock lock(mu_);
  auto& offloader = offloaders_[device.index()];
  if (offloader == nullptr) {
    offloader =
        std::make_shared<DeviceOffloader>(options_, device, link, tier_, std::move(tier), stats_);
    known_[device.index()].store(offloader.get(), std::memory_order_release);
  }
  return offloader;
}

}  // namespace

absl::StatusOr<std::shared_ptr<OffloadSession>> OffloadSession::Create(
    const OffloadOptions& options, DeviceBackend backend,
    std::shared_ptr<PinnedAllocator> allocator) {
  PINION_RETURN_IF_ERROR(options.Validate());
  PINION_ASSIGN_OR_RETURN(const c10::DeviceType device_type, DeviceTypeOf(backend.type_name));
  PINION_RETURN_IF_ERROR(backend.Validate());
  WarnOfSwitches("a session", backend.type_name, /*verifies=*/true);
  OffloadOptions own = options;
  own.enabled = options.enabled && !SwitchedOnByEnvironment("PINION_DISABLE");
  own.verify = options.verify || SwitchedOnByEnvironment("PINION_VERIFY");
  std::shared_ptr<HostTier> tier;
  if (own.enabled) {
    // Fail here if the first device cannot work: a program cannot react in the middle of forward.
    const HostTierOptions tier_options = {options.allocator, options.engine};
    PINION_ASSIGN_OR_RETURN(
        tier, TorchHostTier(tier_options, backend, device_type, std::move(allocator)));
    if (options.memory_target_bytes != OffloadOptions::kNoTarget &&
        !TellsAllocatedBytes(device_type)) {
      return absl::UnimplementedError(absl::StrCat(
          "memory_target_bytes cannot be kept on \"", backend.type_name,
          "\": LibTorch's allocator for it does not tell how many bytes are live (it is no "
          "c10::DeviceAllocator)"));
    }
  }
  return std::make_shared<SessionImpl>(own, device_type, std::move(tier));
}

}  // namespace pinion
