#include "pinion/hooks/weights/device_weights.h"

#include <ATen/core/function_schema.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/device/allocation_label.h"
#include "pinion/engine/stream/stream_in_use.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/tier/torch_memory.h"

namespace pinion {
namespace {

constexpr char kFetching[] = "fetching a layer's weights";

std::vector<std::shared_ptr<WeightParcel>> ParcelsOf(const std::vector<UnitParcel>& units) {
  std::vector<std::shared_ptr<WeightParcel>> parcels;
  for (const UnitParcel& unit : units) parcels.push_back(unit.parcel);
  return parcels;
}

std::string Describe(const TargetWindow::Excess& excess, const UnitParcel& unit) {
  return absl::StrCat(
      "WeightOptions::memory_target_bytes is ", excess.target_bytes, " (",
      HumanBytes(excess.target_bytes), "), and the device has had ", excess.device_bytes, " (",
      HumanBytes(excess.device_bytes), "), with little more of the weights than those of \"",
      unit.name, "\" (", unit.size_bytes(),
      " bytes): make the target as large, or let activations leave (OffloadScope, checkpoint)");
}

}  // namespace

uint64_t TargetWindow::AtUse(const WeightUse& use, const AllocatorBytes& allocator) {
  // A peak from before the first use does not count: the whole model may have been resident.
  const int64_t before_bytes = std::exchange(peak_bytes_, allocator.peak);
  const auto peak_bytes = static_cast<uint64_t>(allocator.peak);
  if (last_unit_.has_value() && allocator.peak > before_bytes && peak_bytes > target_bytes_) {
    const uint64_t most_bytes = std::max(excess_.device_bytes, peak_bytes);
    excess_ = {most_bytes, target_bytes_, *last_unit_};
  }
  last_unit_ = use.object;
  // Weights that are about to be allocated count already, and may exceed the allocator's bytes.
  const auto others = [](int64_t all, uint64_t weights) {
    return static_cast<uint64_t>(std::max<int64_t>(0, all - static_cast<int64_t>(weights)));
  };
  all_bytes_ =
      predictor_.AtUse(use,
                       {.current = others(allocator.current, share_->streamed_bytes()),
                        .allocated = others(allocator.allocated, share_->allocated_bytes())},
                       share_->peak_bound());
  return all_bytes_;
}

uint64_t TargetWindow::OwnBytes() const {
  const uint64_t own_bytes = weights_->current_bytes;
  // Another thread may free some between the two reads.
  const uint64_t others_bytes = std::max(share_->streamed_bytes(), own_bytes) - own_bytes;
  return all_bytes_ - std::min(all_bytes_, others_bytes);
}

std::optional<TargetWindow::Excess> TargetWindow::TakeFirstExcess() {
  if (excess_.device_bytes == 0 || std::exchange(is_told_, true)) return std::nullopt;
  return excess_;
}

void DeviceWeights::Arrive(uint32_t index, const BoundStream& stream) {
  const std::shared_ptr<WeightParcel>& parcel = parcels_[index];
  for (;;) {
    Parcel::Read read = parcel->ReadOrClaim(parcel->reader, Parcel::Afterwards::kKeep);
    if (!read.claim.has_value()) {
      ThrowIfError(read.fetched.copy().WaitOn(stream.native, kWeightAfterCopyIn), kFetching);
      std::vector<c10::DataPtr> away;
      MutexLock lock(mu_);
      away = units_.OnArrived(index, stream, read.fetched);
      return;
    }
    WeightMemory memory = AllocateNow(index, parcel->size_bytes, stream);
    ThrowIfError(Fetch(index, *read.claim, std::move(memory), stream, /*is_ahead=*/false),
                 kFetching);
  }
}

WeightMemory DeviceWeights::Allocate(uint64_t size_bytes, const BoundStream& stream) const {
  const AllocationLabel label("weights fetched by Pinion");
  WeightMemory memory = {StreamedBytes(tier_->share(), model_, size_bytes), {}};
  memory.storage = AllocateStorage(stream.torch, size_bytes);
  memory.bytes.CountAllocation();
  return memory;
}

WeightMemory DeviceWeights::AllocateNow(uint32_t index, uint64_t size_bytes,
                                        const BoundStream& stream) {
  try {
    return Allocate(size_bytes, stream);
  } catch (const c10::OutOfMemoryError&) {
    tier_->share()->EvictIdleWeights(/*most_bytes=*/0);
  }
  try {
    return Allocate(size_bytes, stream);
  } catch (const c10::OutOfMemoryError& error) {
    MutexLock lock(mu_);
    TORCH_CHECK_WITH(OutOfMemoryError, false, "the weights of \"", units_[index].parts.name,
                     "\" need ", size_bytes,
                     " bytes of the device at once, and it has no room for them with all other "
                     "weights away: ",
                     error.what_without_backtrace());
  }
}

absl::Status DeviceWeights::WaitForCopies() const {
  for (const std::shared_ptr<WeightParcel>& parcel : parcels_) {
    PINION_RETURN_IF_ERROR(parcel->ViewOnHost(absl::InfiniteDuration()).status());
  }
  return absl::OkStatus();
}

absl::Status DeviceWeights::Fetch(uint32_t index, FetchClaim& claim, WeightMemory memory,
                                  const BoundStream& stream, bool is_ahead) {
  const uint64_t size_bytes = claim.parcel().size_bytes;
  StreamedBytes refused;  // is destroyed after the memory
  Arrival arrival = {std::move(claim), TorchMemory(std::move(memory.storage))};
  GuardedMemories unneeded;
  {
    // Before another thread can see the copy, and evict it.
    MutexLock lock(mu_);
    units_[index].bytes = std::move(memory.bytes);
  }
  const absl::Status fetched =
      tier_->Fetch(absl::MakeSpan(&arrival, 1), stream.native, unneeded).status();
  MutexLock lock(mu_);
  if (!fetched.ok()) {
    refused = std::move(units_[index].bytes);
    return fetched;
  }
  units_.CountFetch(size_bytes, is_ahead);
  return absl::OkStatus();
}

void DeviceWeights::FetchAhead(uint32_t index, const BoundStream& stream) {
  std::optional<FetchClaim> claim = parcels_[index]->ClaimIfAway();
  if (!claim.has_value()) return;
  bool may_try = false;
  {
    MutexLock lock(mu_);
    may_try = back_off_.MayTry();
  }
  bool is_fetched = false;
  bool room_was_made = false;
  if (may_try) {
    try {
      const int64_t retries = AllocationRetries(stream.torch.device());
      WeightMemory memory = Allocate(claim->parcel().size_bytes, stream);
      room_was_made = AllocationRetries(stream.torch.device()) > retries;
      is_fetched = Fetch(index, *claim, std::move(memory), stream, /*is_ahead=*/true).ok();
    } catch (const std::exception&) {
      // Out of memory, most likely.
    }
  }
  // Lets the next user fetch the unit. Comes before OnFetchRefused, which asks whether anybody
  // does.
  if (!is_fetched) claim.reset();
  MutexLock lock(mu_);
  // A failing allocation is expensive: LibTorch's CUDA allocator frees its cache.
  if (may_try) is_fetched && !room_was_made ? back_off_.Worked() : back_off_.Refused();
  if (!is_fetched) units_.OnFetchRefused(index, /*was_tried=*/may_try);
}

DeviceWeights::DeviceWeights(c10::Device device, std::shared_ptr<HostTier> host,
                             std::shared_ptr<DeviceTier> tier, const WeightRoom& room,
                             std::vector<UnitParcel> units)
    : device_(device),
      host_(std::move(host)),
      tier_(std::move(tier)),
      wanted_(room.wanted),
      parcels_(ParcelsOf(units)),
      units_(std::move(units), room, *this, device),
      target_(room.target_bytes.has_value()
                  ? std::make_unique<TargetWindow>(*room.target_bytes, tier_->share(), model_)
                  : nullptr) {
  tier_->share()->Want(wanted_);
}

// Work on streams may still use weights, and comes before the frees.
DeviceWeights::~DeviceWeights() {
  AllDropped dropped;
  {
    MutexLock lock(mu_);
    for (uint32_t index = 0; index < units_.all().size(); ++index) {
      units_.Drop(index, dropped);
    }
  }
  FreeDropped(dropped, tier_->engine());
  tier_->share()->WantNoMore(wanted_);
}

// ---------------------------------------------------------------------------------------- in use

void DeviceWeights::Enter(uint32_t index, uint64_t argument_bytes) {
  const BoundStream stream(CurrentStream(device_));
  const StreamInUse in_use(tier_->engine().device(), stream.native);
  const bool is_captured = tier_->engine().IsCapturing(stream.native).value_or(false);
  const WeightUse use = {.object = index,
                         .builds_graph = c10::GradMode::is_enabled(),
                         .in_backward = CurrentBackward() != -1,
                         .argument_bytes = argument_bytes};
  if (target_ != nullptr && !is_captured) MakeRoom(use);
  AllDropped dropped;
  PrefetchPlan plan;
  bool is_ready = false;
  {
    MutexLock lock(mu_);
    const DeviceUnit& unit = units_[index];
    TORCH_CHECK(
        !is_captured, "a graph is captured, and the weights of \"", unit.parts.name,
        "\" are streamed: replays would read memory that is free by then. Run the model without "
        "capturing it, or keep its weights on the device");
    TORCH_CHECK(paused_by_ == nullptr, "the weights of \"", unit.parts.name, "\" are used while ",
                paused_by_,
                " changes weights on the host: run the "
                "model before or after the step, and make optimizers over host_parameters()");
    const MasterWatch* const changed = unit.parts.Changed(use.in_backward);
    TORCH_CHECK(changed == nullptr, "the host's copy of ", changed->name(),
                " was changed outside WeightOffloader::Step, and the device may have what was "
                "there before: change host_parameters() within Step; Step([] {}) takes over what "
                "was changed by now");
    UpdateWindow();
    plan = units_.OnUse(index, dropped);
    is_ready = unit.IsReadyOn(stream) && plan.fetches.empty();
  }
  FreeDropped(dropped, tier_->engine());
  if (is_ready) return;
  try {
    Arrive(index, stream);
  } catch (...) {
    MutexLock lock(mu_);
    units_.CancelUse(index, plan);
    throw;
  }
  FetchAllAhead(plan);
}

void DeviceWeights::MakeRoom(const WeightUse& use) {
  const AllocatorBytes allocator = AllocatorBytesOf(device_);
  std::string excess;
  uint64_t most_bytes = 0;  // of all weights but this model's, beside the unit
  {
    MutexLock lock(mu_);
    const uint64_t all_bytes = target_->AtUse(use, allocator);
    const uint64_t unit_bytes = units_[use.object].parts.size_bytes();
    most_bytes = all_bytes - std::min(all_bytes, unit_bytes);
    const std::optional<TargetWindow::Excess> first = target_->TakeFirstExcess();
    if (first.has_value()) excess = Describe(*first, units_[first->unit].parts);
  }
  if (!excess.empty()) PINION_LOG(kError) << excess;
  tier_->share()->OnUse(this);
  tier_->share()->EvictIdleWeights(most_bytes + model_->current_bytes, /*unless_in_use=*/false,
                                   /*except=*/this);
}

void DeviceWeights::EvictIdle(bool unless_in_use) {
  AllDropped dropped;
  {
    MutexLock lock(mu_);
    if (unless_in_use && units_.IsAnyInUse()) return;
    units_.DropAllIdle(dropped);
  }
  FreeDropped(dropped, tier_->engine());
}

void DeviceWeights::Leave(uint32_t index) {
  AllDropped dropped;
  PrefetchPlan plan;
  {
    MutexLock lock(mu_);
    UpdateWindow();
    plan = units_.OnUsed(index, dropped);
  }
  FreeDropped(dropped, tier_->engine());
  FetchAllAhead(plan);
}

void DeviceWeights::FetchAllAhead(const PrefetchPlan& plan) {
  if (plan.fetches.empty()) return;
  const BoundStream stream(CurrentStream(device_));
  for (const uint32_t index : plan.fetches) {
    FetchAhead(index, stream);
    MutexLock lock(mu_);
    units_.EndFetch(index);
  }
}

std::string DeviceWeights::NameOf(uint32_t index, const at::Tensor& weight) const {
  std::string name;
  for (const WeightPiece& piece : units_.all()[index].parts.pieces) {
    const auto storage = piece.storage.lock();
    if (storage.get() == weight.storage().unsafeGetStorageImpl()) name = piece.name;
  }
  return name;
}

void DeviceWeights::OnReplaced(uint32_t index, const at::Tensor& weight) {
  std::string name;
  {
    MutexLock lock(mu_);
    if (std::exchange(has_told_of_replaced_, true)) return;
    name = NameOf(index, weight);
  }
  PINION_LOG(kWarning) << "the weight " << name
                       << " was given other memory, by set_data(), to() or torch::load, and is "
                          "not streamed while it has that: load and change weights within "
                          "WeightOffloader::WithParametersOnHost, and their type before Attach";
}

bool DeviceWeights::Write(uint32_t index, const WritingOperator& op) {
  std::string name;
  {
    MutexLock lock(mu_);
    name = NameOf(index, op.written);
  }
  TORCH_CHECK(false, op.schema.name(), " would change the weight ", name,
              " on the device, which has a copy of it alone: change it in WeightOffloader::Step, "
              "through host_parameters(), of which an optimizer is made, or, if it is a buffer, in "
              "WeightOffloader::WithParametersOnHost");
}

// --------------------------------------------------------------------------------- on the host

void DeviceWeights::Pause(const char* call) {
  {
    MutexLock lock(mu_);
    TORCH_CHECK(paused_by_ == nullptr, call, " was called within ", paused_by_, ": call it after ",
                paused_by_, " has returned");
    for (const DeviceUnit& unit : units_.all()) {
      TORCH_CHECK(unit.users == 0, call, " was called while an operator uses \"", unit.parts.name,
                  "\" on another thread: wait for it");
    }
    paused_by_ = call;
  }
  const absl::Status done = WaitForCopies();
  if (done.ok()) return;
  Resume({});
  ThrowIfError(done, "waiting for copies of weights that are to be changed");
}

void DeviceWeights::Resume(const std::vector<uint32_t>& changed) {
  AllDropped dropped;
  {
    MutexLock lock(mu_);
    for (const uint32_t index : changed) units_.Drop(index, dropped);
    paused_by_ = nullptr;
  }
  FreeDropped(dropped, tier_->engine());
}

void DeviceWeights::FetchExpected() {
  AllDropped dropped;
  PrefetchPlan plan;
  {
    MutexLock lock(mu_);
    UpdateWindow();
    plan = units_.OnChange(dropped);
  }
  FreeDropped(dropped, tier_->engine());
  FetchAllAhead(plan);
}

WeightStats DeviceWeights::GetStats() const {
  MutexLock lock(mu_);
  WeightStats stats = units_.GetStats();
  if (target_ != nullptr) stats.excess_device_bytes = target_->excess_device_bytes();
  return stats;
}

}  // namespace pinion
