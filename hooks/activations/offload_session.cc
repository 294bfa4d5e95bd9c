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
#include <thread>
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
#include "pinion/hooks/activations/device_offloader.h"
#include "pinion/hooks/activations/offload_stats_recorder.h"
#include "pinion/hooks/activations/pack_scope.h"
#include "pinion/hooks/activations/step_learner.h"
#include "pinion/hooks/autograd/memory_observer.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/environment.h"
#include "pinion/hooks/plan/device_recording.h"
#include "pinion/hooks/plan/noted_objects.h"
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
    for (DeviceOffloader* const offloader : Offloaders()) {
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
    DeviceOffloader* const offloader = FindOffloader(device_index);
    if (offloader == nullptr) return EngineStats();
    offloader->engine().Poll();
    return offloader->engine().GetStats();
  }

  std::optional<LinkCalibration> GetLink(int device_index) const override {
    DeviceOffloader* const offloader = FindOffloader(device_index);
    if (offloader == nullptr) return std::nullopt;
    return offloader->link();
  }

  std::vector<LiveTensor> LiveTensors() const override {
    std::vector<LiveTensor> tensors;
    for (DeviceOffloader* const offloader : Offloaders()) offloader->AppendLive(tensors);
    return tensors;
  }

  std::vector<PlannedStep> PlannedSteps(int device_index) const override {
    DeviceOffloader* const offloader = FindOffloader(device_index);
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
    if (auto* const offloader = FindOffloader(device_index)) offloader->FreeDeviceMemory();
  }

  absl::StatusOr<uint64_t> Trim(uint64_t keep_bytes) override {
    return tier_ == nullptr ? 0 : tier_->pool().Trim(keep_bytes);
  }

  std::shared_ptr<PackScope> OuterScope() const override;
  std::shared_ptr<SavedTensorPacker> NewPacker(ScopeModule module,
                                               std::shared_ptr<PackScope> scope) override;

  void EndScope(const PackScope& scope) override {
    {
      MutexLock lock(mu_);
      std::erase_if(failed_, [](const auto& one) { return !absl::IsUnimplemented(one.second); });
    }
    for (DeviceOffloader* const offloader : Offloaders()) offloader->EndScope(scope.id);
    const bool all_elsewhere = scope.saved_unsupported && !scope.saved_supported;
    if (all_elsewhere && IsFirstToldOf(c10::Device(device_type_))) WarnOfNoTensorOn(device_type_);
  }

  CastNotes NoteCasts() override {
    return options_.cast_weights_again ? casts_.Note() : CastNotes();
  }

  std::shared_ptr<MemoryObserver> Observer() override;

  void OnDeviceBytes(c10::Device device, int64_t allocated_bytes, int64_t added_bytes,
                     const void* freed) override {
    if (device.type() != device_type_) return;
    DeviceOffloader* const offloader = FindOffloader(device.index());
    if (offloader == nullptr) return;
    offloader->learner()->OnDeviceBytes(allocated_bytes, added_bytes, freed);
  }
  void OnRefused(c10::Device device, int64_t wanted_bytes) override {
    if (device.type() != device_type_) return;
    DeviceOffloader* const offloader = FindOffloader(device.index());
    if (offloader != nullptr) offloader->learner()->OnRefused(wanted_bytes);
  }
  void OnUnobserved() override {
    for (DeviceOffloader* const offloader : Offloaders()) offloader->learner()->OnUnobserved();
  }
  void OnAccumulate(const at::Tensor& leaf) override {
    if (leaf.device().type() != device_type_) return;
    DeviceOffloader* const offloader = FindOffloader(leaf.device().index());
    if (offloader != nullptr) offloader->learner()->OnAccumulate(leaf);
  }

 private:
  class Packer;

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
      if (auto* const offloader = FindOffloader(device.index())) offloader->CountKept();
    }
  }
  std::unique_ptr<SavedTensor> Keep(const at::Tensor& tensor, uint64_t OffloadStats::*reason) {
    CountKept(reason, tensor.device());
    return KeepTensor(tensor);
  }

  // Returns null before the device's first use.
  DeviceOffloader* FindOffloader(int device_index) const {
    const bool is_index = device_index >= 0 && device_index < static_cast<int>(offloaders_.size());
    return is_index ? offloaders_[device_index].load(std::memory_order_acquire) : nullptr;
  }

  std::vector<DeviceOffloader*> Offloaders() const {
    std::vector<DeviceOffloader*> offloaders;
    for (const std::atomic<DeviceOffloader*>& one : offloaders_) {
      if (DeviceOffloader* const offloader = one.load(std::memory_order_acquire)) {
        offloaders.push_back(offloader);
      }
    }
    return offloaders;
  }

  // Returns the device's offloader. Logs a failure once and returns null; throws if the device is
  // none of the backend's.
  DeviceOffloader* FindOrSetUp(c10::Device device);
  // Returns the device's offloader, set up at its first use. A failure is not retried in the scope.
  absl::StatusOr<DeviceOffloader*> OffloaderFor(c10::Device device);
  absl::StatusOr<DeviceOffloader*> SetUp(c10::Device device);
  // Returns whether nothing about the device was logged. -1 stands for the lack of any device.
  bool IsFirstToldOf(c10::Device device);

  const OffloadOptions options_;
  const c10::DeviceType device_type_;
  const std::shared_ptr<HostTier> tier_;
  CastSources casts_;
  const std::shared_ptr<OffloadStatsRecorder> stats_ = std::make_shared<OffloadStatsRecorder>();

  // By device index; null before the device's first use. Written under mu_.
  std::array<std::atomic<DeviceOffloader*>, 128> offloaders_ = {};
  mutable Mutex mu_;
  std::vector<std::shared_ptr<DeviceOffloader>> owned_ ABSL_GUARDED_BY(mu_);
  std::map<int, absl::Status> failed_ ABSL_GUARDED_BY(mu_);  // by device; only some are permanent
  std::set<int> told_ ABSL_GUARDED_BY(mu_);                  // devices whose failure was logged
};

// Packs the tensors that autograd saves in a scope.
class SessionImpl::Packer final : public SavedTensorPacker {
 public:
  Packer(std::shared_ptr<SessionImpl> session, ScopeModule module, std::shared_ptr<PackScope> scope)
      : session_(std::move(session)), module_(std::move(module)), scope_(std::move(scope)) {}

  bool IsOf(const SessionImpl& session) const { return session_.get() == &session; }
  const std::shared_ptr<PackScope>& scope() const { return scope_; }

  std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace& place) override;
  std::optional<uint32_t> KeepSegment(const SegmentBegin& segment) override;

 private:
  const std::shared_ptr<SessionImpl> session_;
  const ScopeModule module_;
  const std::shared_ptr<PackScope> scope_;
};

std::shared_ptr<SavedTensorPacker> SessionImpl::NewPacker(ScopeModule module,
                                                          std::shared_ptr<PackScope> scope) {
  const auto self = std::static_pointer_cast<SessionImpl>(shared_from_this());
  return std::make_shared<Packer>(self, std::move(module), std::move(scope));
}

// A scope that LibTorch carried here from another thread does not count: it may end first, and then
// nothing would submit the inner scope's copies.
std::shared_ptr<PackScope> SessionImpl::OuterScope() const {
  const auto* packer = dynamic_cast<const Packer*>(CurrentPacker());
  if (packer == nullptr || !packer->IsOf(*this)) return nullptr;
  const std::shared_ptr<PackScope>& outer = packer->scope();
  return outer->opened_on == std::this_thread::get_id() && !outer->ended ? outer : nullptr;
}

// Segments in a backward, or after the scope's end, are not recorded.
std::optional<uint32_t> SessionImpl::Packer::KeepSegment(const SegmentBegin& segment) {
  const bool is_planned = session_->options_.memory_target_bytes != OffloadOptions::kNoTarget;
  if (!is_planned || segment.device.type() != session_->device_type_) return std::nullopt;
  if (CurrentBackward() != -1 || scope_->ended) return std::nullopt;
  // A failure is reported when the segment's inputs are saved.
  const auto offloader = session_->OffloaderFor(segment.device);
  if (!offloader.ok()) return std::nullopt;
  return (*offloader)->learner()->KeepSegment(segment, scope_->id);
}

std::unique_ptr<SavedTensor> SessionImpl::Packer::Pack(const at::Tensor& tensor,
                                                       const GraphPlace& place) {
  SessionImpl& session = *session_;
  const OffloadOptions& options = session.options_;
  HostTimer timer(*session.stats_);
  timer.Count(&OffloadStats::packed);
  const c10::Device device = tensor.device();
  // Recomputed tensors are needed at once, those that a double backward saves soon.
  if (CurrentBackward() != -1) return session.Keep(tensor, &OffloadStats::kept_in_backward);
  const ParameterStorages* const parameters =
      module_.parameters.has_value() ? &*module_.parameters : nullptr;
  const TensorKind kind =
      ClassifyTensor(tensor, session.device_type_, options.min_offload_bytes, parameters);
  if (kind == TensorKind::kUnsupported) {
    // A wrapper may have a device without memory there, as fake tensors do.
    if (IsPlainTensor(tensor)) session.RefuseOtherAccelerator(device);
    if (tensor.dim() > 0) Raise(scope_->saved_unsupported);
    return session.Keep(tensor, &OffloadStats::kept_unsupported);
  }
  Raise(scope_->saved_supported);
  const auto reason = kind == TensorKind::kParameter ? &OffloadStats::kept_parameter
                      : kind == TensorKind::kSmall   ? &OffloadStats::kept_small
                                                     : &OffloadStats::kept_head;
  // Also for small tensors: autocast's cast of a small weight identifies a head's node.
  if (module_.heads != nullptr) {
    HeadNodes::Save save = module_.heads->OnSave(tensor, place.node);
    if (save.is_parameter) {
      auto* const offloader = session.FindOffloader(device.index());
      if (offloader != nullptr) offloader->KeepSavedBy(place.node);
    }
    if (save.is_heads) {
      session.CountKept(reason, device);
      return KeepWith(tensor, std::move(save.earlier));
    }
  }
  if (kind == TensorKind::kParameter || kind == TensorKind::kSmall) {
    return session.Keep(tensor, reason);
  }
  DeviceOffloader* const offloader = session.FindOrSetUp(device);
  if (offloader == nullptr) return session.Keep(tensor, &OffloadStats::kept_copy_failed);
  std::unique_ptr<const ParameterCast> cast;
  if (options.cast_weights_again) cast = session.casts_.Find(tensor, scope_->casts, scope_->begin);
  const bool is_leaf = kind == TensorKind::kHeldLeaf;
  StepLearner* const learner = offloader->learner();
  const uint64_t number = learner == nullptr ? 0 : PlaceNumber(scope_->begin, place);
  const std::shared_ptr<DeviceRecording> recording =
      learner == nullptr ? nullptr : learner->BeginSave(tensor, number);
  DeviceRecording::Moment begin;
  if (recording != nullptr) begin = recording->Begin();
  DeviceOffloader::Packed packed =
      offloader->Pack(tensor, place.node, number, is_leaf, std::move(cast), *scope_);
  if (packed.handle == nullptr) {
    if (recording != nullptr) recording->EndAside(begin);
    if (learner != nullptr) learner->EndStepIfNone();
    return KeepTensor(tensor);
  }
  if (recording == nullptr) return std::move(packed.handle);
  const DeviceRecording::Saved as = {tensor, number, is_leaf, packed.noted};
  return std::make_unique<RecordedTensor>(std::move(packed.handle), recording, begin, as);
}

DeviceOffloader* SessionImpl::FindOrSetUp(c10::Device device) {
  const absl::StatusOr<DeviceOffloader*> made = OffloaderFor(device);
  if (made.ok()) return *made;
  if (absl::IsInvalidArgument(made.status()) || absl::IsNotFound(made.status())) {
    ThrowIfError(made.status(), "setting up offload for a device");
  }
  if (IsFirstToldOf(device)) {
    PINION_LOG(kWarning) << "saved tensors stay on " << device.str()
                         << ", which cannot be set up: " << made.status();
  }
  return nullptr;
}

std::shared_ptr<MemoryObserver> SessionImpl::Observer() {
  if (options_.memory_target_bytes == OffloadOptions::kNoTarget) return nullptr;
  const std::vector<DeviceOffloader*> offloaders = Offloaders();
  const bool is_curious = offloaders.empty() ||
                          std::any_of(offloaders.begin(), offloaders.end(),
                                      [](const auto* one) { return one->learner()->IsCurious(); });
  const auto self = std::static_pointer_cast<SessionImpl>(shared_from_this());
  if (is_curious) {
    ObserveBackwards(self);
    return self;
  }
  IgnoreBackwards(*this);
  return nullptr;
}

absl::StatusOr<DeviceOffloader*> SessionImpl::OffloaderFor(c10::Device device) {
  if (DeviceOffloader* const offloader = FindOffloader(device.index())) return offloader;
  {
    MutexLock lock(mu_);
    if (const auto found = failed_.find(device.index()); found != failed_.end()) {
      return found->second;
    }
  }
  absl::StatusOr<DeviceOffloader*> offloader = SetUp(device);
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

absl::StatusOr<DeviceOffloader*> SessionImpl::SetUp(c10::Device device) {
  // Not under the lock, because this calls the device. If two threads do, the first one wins.
  PINION_ASSIGN_OR_RETURN(std::shared_ptr<DeviceTier> tier, tier_->ForDevice(device.index()));
  PINION_RETURN_IF_ERROR(CheckHasOwnMemory(*tier));
  // Without overlap nothing is planned, so the link need not be measured.
  const LinkCalibration link = options_.link.has_value() ? *options_.link
                               : options_.overlap ? tier->Link(NativeStream(CurrentStream(device)))
                                                  : AssumedLink();
  MutexLock lock(mu_);
  if (DeviceOffloader* const first = FindOffloader(device.index())) return first;
  owned_.push_back(
      std::make_shared<DeviceOffloader>(options_, device, link, tier_, std::move(tier), stats_));
  offloaders_[device.index()].store(owned_.back().get(), std::memory_order_release);
  return owned_.back().get();
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
