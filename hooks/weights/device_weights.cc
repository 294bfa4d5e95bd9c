#include "pinion/hooks/weights/device_weights.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"

namespace pinion {
namespace {

VisitLimits LimitsOf(const std::vector<UnitParcel>& units, uint64_t window_bytes) {
  VisitLimits limits = {.sizes_bytes = {}, .window_bytes = window_bytes};
  for (const UnitParcel& unit : units) limits.sizes_bytes.push_back(unit.device_bytes);
  return limits;
}

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
      unit.name, "\" (", unit.device_bytes,
      " bytes): make the target as large, or let activations leave (OffloadScope, checkpoint)");
}

}  // namespace

bool DeviceWeights::Unit::IsReadyOn(const BoundStream& stream) const {
  return std::any_of(streams.begin(), streams.end(),
                     [&](const BoundStream& s) { return s.torch == stream.torch; });
}

DeviceWeights::DeviceWeights(c10::Device device, std::shared_ptr<HostTier> host,
                             std::shared_ptr<DeviceTier> tier, const WeightRoom& room,
                             std::vector<UnitParcel> units)
    : device_(device),
      host_(std::move(host)),
      tier_(std::move(tier)),
      wanted_(room.wanted),
      parcels_(ParcelsOf(units)),
      target_(room.target_bytes.has_value()
                  ? std::make_unique<TargetWindow>(*room.target_bytes, room.widening_bytes,
                                                   tier_->share(), visitor_)
                  : nullptr),
      schedule_(LimitsOf(units, room.window_bytes)) {
  stats_.two_largest_bytes = room.two_largest_bytes;
  tier_->share()->Want(wanted_);
  for (UnitParcel& unit : units) {
    // The second one never reads, so that what was fetched stays with the parcel until Drop.
    unit.parcel->AddReaders(2);
    units_.push_back(
        {.parts = std::move(unit), .bytes = {}, .memory = {}, .wide = {}, .streams = {}});
  }
}

// Nobody uses the weights any more, but work on streams may: it goes before the memory.
DeviceWeights::~DeviceWeights() {
  AllDropped dropped;
  {
    MutexLock lock(mu_);
    for (uint32_t index = 0; index < units_.size(); ++index) Drop(index, dropped);
  }
  LetGoOf(dropped, tier_->engine());
  tier_->share()->WantNoMore(wanted_);
}

// ---------------------------------------------------------------------------------------- in use

void DeviceWeights::Enter(uint32_t index, uint64_t argument_bytes) {
  const BoundStream stream(CurrentStream(device_));
  const AllocatorBytes allocator =
      target_ != nullptr ? AllocatorBytesOf(device_) : AllocatorBytes();
  const VisitUse use = {.object = index,
                        .builds_graph = c10::GradMode::is_enabled(),
                        .in_backward = CurrentBackward() != -1,
                        .argument_bytes = argument_bytes};
  AllDropped dropped;
  Visit visit;
  std::string excess;
  bool is_widened = false;
  bool is_ready = false;
  {
    MutexLock lock(mu_);
    Unit& unit = units_[index];
    is_widened = unit.parts.is_widened;
    TORCH_CHECK(!paused_, "the weights of \"", unit.parts.name,
                "\" are used while WeightOffloader::Step changes weights on the host: run the "
                "model before or after the step");
    const MasterWatch* const changed = unit.parts.Changed();
    TORCH_CHECK(changed == nullptr, "the host's copy of ", changed->name(),
                " was changed outside WeightOffloader::Step, and the device may have what was "
                "there before: change host_parameters() within Step; Step([] {}) takes over what "
                "was changed by now");
    ++unit.users;
    if (target_ != nullptr) {
      schedule_.set_window_bytes(target_->AtUse(use, allocator));
      const std::optional<TargetWindow::Excess> first = target_->TakeFirstExcess();
      if (first.has_value()) excess = Describe(*first, units_[first->unit].parts);
    }
    visit = schedule_.OnUse(index, [this](uint32_t other) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      return MayDrop(other);
    });
    Begin(visit, dropped);
    is_ready = unit.IsReadyOn(stream) && visit.fetches.empty();
  }
  if (!excess.empty()) PINION_LOG(kError) << excess;
  LetGoOf(dropped, tier_->engine());
  if (is_ready) return;
  try {
    is_widened ? ArriveWide(index, stream) : Arrive(index, stream);
  } catch (...) {
    MutexLock lock(mu_);
    --units_[index].users;
    for (const uint32_t other : visit.fetches) {
      --units_[other].users;
      NoteFailure(other);
    }
    throw;
  }
  FetchAllAhead(visit);
}

void DeviceWeights::Leave(uint32_t index) {
  AllDropped dropped;
  Visit visit;
  {
    MutexLock lock(mu_);
    --units_[index].users;
    visit = schedule_.OnUsed(index, [this](uint32_t other) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      return MayDrop(other);
    });
    Begin(visit, dropped);
  }
  LetGoOf(dropped, tier_->engine());
  FetchAllAhead(visit);
}

void DeviceWeights::Begin(const Visit& visit, AllDropped& dropped) {
  for (const uint32_t other : visit.drops) Drop(other, dropped);
  for (const uint32_t other : visit.fetches) ++units_[other].users;
}

void DeviceWeights::FetchAllAhead(const Visit& visit) {
  if (visit.fetches.empty()) return;
  const BoundStream stream(CurrentStream(device_));
  for (const uint32_t index : visit.fetches) {
    FetchAhead(index, stream);
    MutexLock lock(mu_);
    --units_[index].users;
  }
}

std::string DeviceWeights::NameOf(uint32_t index, const at::Tensor& tensor) const {
  MutexLock lock(mu_);
  const Unit& unit = units_[index];
  for (const WeightPiece& piece : unit.parts.pieces) {
    const auto storage = piece.storage.lock();
    if (storage.get() == tensor.storage().unsafeGetStorageImpl()) return piece.name;
  }
  return unit.parts.name;
}

bool DeviceWeights::MayDrop(uint32_t index) const {
  const Unit& unit = units_[index];
  return unit.users == 0 && unit.parts.parcel->state() != Parcel::State::kFetching;
}

void DeviceWeights::NoteFailure(uint32_t index) {
  const Unit& unit = units_[index];
  if (unit.parts.parcel->state() == Parcel::State::kAway && !unit.wide) schedule_.OnAway(index);
}

// ------------------------------------------------------------------------------------------ out

void DeviceWeights::Drop(uint32_t index, AllDropped& dropped) {
  Unit& unit = units_[index];
  schedule_.OnAway(index);
  GuardedMemory fetched = unit.parts.parcel->TakeFetched();
  if (!fetched && !unit.wide) return;
  ++stats_.drops;
  const bool is_used = unit.memory || unit.wide;
  unit.memory.Disarm();  // another reference to what `fetched` has
  dropped.push_back({.bytes = std::exchange(unit.bytes, {}),
                     .memory = std::move(fetched),
                     .wide = std::exchange(unit.wide, {}),
                     .streams = std::exchange(unit.streams, {}),
                     .data = {}});
  if (is_used) dropped.back().data = unit.parts.PointTo(nullptr, *this, device_);
}

void DeviceWeights::DropAllIdle() {
  AllDropped dropped;
  {
    MutexLock lock(mu_);
    for (uint32_t index = 0; index < units_.size(); ++index) {
      if (MayDrop(index)) Drop(index, dropped);
    }
  }
  LetGoOf(dropped, tier_->engine());
}

// --------------------------------------------------------------------------------- on the host

void DeviceWeights::Pause() {
  {
    MutexLock lock(mu_);
    TORCH_CHECK(!paused_, "WeightOffloader::Step was called within itself");
    for (const Unit& unit : units_) {
      TORCH_CHECK(unit.users == 0, "WeightOffloader::Step was called while an operator uses \"",
                  unit.parts.name, "\" on another thread: wait for it");
    }
    paused_ = true;
  }
  for (const std::shared_ptr<WeightParcel>& parcel : parcels_) {
    const absl::Status done = parcel->ViewOnHost(absl::InfiniteDuration()).status();
    if (done.ok()) continue;
    Resume({});
    ThrowIfError(done, "waiting for copies of weights that are to be changed");
  }
}

void DeviceWeights::Resume(const std::vector<uint32_t>& changed) {
  AllDropped dropped;
  {
    MutexLock lock(mu_);
    for (const uint32_t index : changed) Drop(index, dropped);
    paused_ = false;
  }
  LetGoOf(dropped, tier_->engine());
}

void DeviceWeights::FetchExpected() {
  AllDropped dropped;
  Visit visit;
  {
    MutexLock lock(mu_);
    visit = schedule_.OnChange([this](uint32_t other)
                                   ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return MayDrop(other); });
    Begin(visit, dropped);
  }
  LetGoOf(dropped, tier_->engine());
  FetchAllAhead(visit);
}

WeightStats DeviceWeights::GetStats() const {
  MutexLock lock(mu_);
  WeightStats stats = stats_;
  stats.here_bytes = schedule_.here_bytes();
  if (target_ != nullptr) stats.excess_device_bytes = target_->excess_device_bytes();
  return stats;
}

}  // namespace pinion
