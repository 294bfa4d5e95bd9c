#include "pinion/hooks/weights/device_weights.h"

#include <ATen/core/function_schema.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/engine/stream/stream_in_use.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"

namespace pinion {
namespace {

std::vector<std::shared_ptr<WeightParcel>> ParcelsOf(const std::vector<DeviceUnit>& units) {
  std::vector<std::shared_ptr<WeightParcel>> parcels;
  for (const DeviceUnit& unit : units) parcels.push_back(unit.parts.parcel);
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

DeviceWeights::DeviceWeights(c10::Device device, std::shared_ptr<HostTier> host,
                             std::shared_ptr<DeviceTier> tier, const WeightRoom& room,
                             std::vector<UnitParcel> units)
    : device_(device),
      host_(std::move(host)),
      tier_(std::move(tier)),
      wanted_(room.wanted),
      state_{.mu = {}, .units = DeviceUnits(std::move(units), room, *this, device)},
      arrivals_(state_, tier_, visitor_, ParcelsOf(state_.units.all())),
      target_(room.target_bytes.has_value()
                  ? std::make_unique<TargetWindow>(*room.target_bytes, tier_->share(), visitor_)
                  : nullptr) {
  tier_->share()->Want(wanted_);
}

// Work on streams may still use weights, and comes before the frees.
DeviceWeights::~DeviceWeights() {
  AllDropped dropped;
  {
    MutexLock lock(state_.mu);
    for (uint32_t index = 0; index < state_.units.all().size(); ++index) {
      state_.units.Drop(index, dropped);
    }
  }
  LetGoOf(dropped, tier_->engine());
  tier_->share()->WantNoMore(wanted_);
}

// ---------------------------------------------------------------------------------------- in use

void DeviceWeights::Enter(uint32_t index, uint64_t argument_bytes) {
  const BoundStream stream(CurrentStream(device_));
  const StreamInUse in_use(tier_->engine().device(), stream.native);
  const bool is_captured = tier_->engine().IsCapturing(stream.native).value_or(false);
  const AllocatorBytes allocator =
      target_ != nullptr ? AllocatorBytesOf(device_) : AllocatorBytes();
  const VisitUse use = {.object = index,
                        .builds_graph = c10::GradMode::is_enabled(),
                        .in_backward = CurrentBackward() != -1,
                        .argument_bytes = argument_bytes};
  AllDropped dropped;
  Visit visit;
  std::string excess;
  bool is_ready = false;
  {
    MutexLock lock(state_.mu);
    const DeviceUnit& unit = state_.units[index];
    TORCH_CHECK(
        !is_captured, "a graph is captured, and the weights of \"", unit.parts.name,
        "\" are streamed: replays would read memory that is free by then. Run the model without "
        "capturing it, or keep its weights on the device");
    TORCH_CHECK(!paused_, "the weights of \"", unit.parts.name,
                "\" are used while WeightOffloader::Step changes weights on the host: run the "
                "model before or after the step, and make optimizers over host_parameters()");
    const MasterWatch* const changed = unit.parts.Changed(use.in_backward);
    TORCH_CHECK(changed == nullptr, "the host's copy of ", changed->name(),
                " was changed outside WeightOffloader::Step, and the device may have what was "
                "there before: change host_parameters() within Step; Step([] {}) takes over what "
                "was changed by now");
    if (target_ != nullptr) {
      state_.units.set_window_bytes(target_->AtUse(use, allocator));
      const std::optional<TargetWindow::Excess> first = target_->TakeFirstExcess();
      if (first.has_value()) excess = Describe(*first, state_.units[first->unit].parts);
    }
    visit = state_.units.OnUse(index, dropped);
    is_ready = unit.IsReadyOn(stream) && visit.fetches.empty();
  }
  if (!excess.empty()) PINION_LOG(kError) << excess;
  LetGoOf(dropped, tier_->engine());
  if (is_ready) return;
  try {
    arrivals_.Arrive(index, stream);
  } catch (...) {
    MutexLock lock(state_.mu);
    state_.units.CancelUse(index, visit);
    throw;
  }
  FetchAllAhead(visit);
}

void DeviceWeights::Leave(uint32_t index) {
  AllDropped dropped;
  Visit visit;
  {
    MutexLock lock(state_.mu);
    visit = state_.units.OnUsed(index, dropped);
  }
  LetGoOf(dropped, tier_->engine());
  FetchAllAhead(visit);
}

void DeviceWeights::FetchAllAhead(const Visit& visit) {
  if (visit.fetches.empty()) return;
  const BoundStream stream(CurrentStream(device_));
  for (const uint32_t index : visit.fetches) {
    arrivals_.FetchAhead(index, stream);
    MutexLock lock(state_.mu);
    state_.units.EndFetch(index);
  }
}

bool DeviceWeights::Write(uint32_t index, const WritingOperator& op) {
  std::string name;
  {
    MutexLock lock(state_.mu);
    const UnitParcel& unit = state_.units[index].parts;
    name = unit.name;
    for (const WeightPiece& piece : unit.pieces) {
      const auto storage = piece.storage.lock();
      if (storage.get() == op.written.storage().unsafeGetStorageImpl()) name = piece.name;
    }
  }
  TORCH_CHECK(false, op.schema.name(), " would change the weight ", name,
              " on the device, which has a copy of it alone: change it in WeightOffloader::Step, "
              "through host_parameters(), of which an optimizer is made, or, if it is a buffer, in "
              "WeightOffloader::WithParametersOnHost");
}

// --------------------------------------------------------------------------------- on the host

void DeviceWeights::Pause() {
  {
    MutexLock lock(state_.mu);
    TORCH_CHECK(!paused_, "WeightOffloader::Step was called within itself");
    for (const DeviceUnit& unit : state_.units.all()) {
      TORCH_CHECK(unit.users == 0, "WeightOffloader::Step was called while an operator uses \"",
                  unit.parts.name, "\" on another thread: wait for it");
    }
    paused_ = true;
  }
  const absl::Status done = arrivals_.WaitForCopies();
  if (done.ok()) return;
  Resume({});
  ThrowIfError(done, "waiting for copies of weights that are to be changed");
}

void DeviceWeights::Resume(const std::vector<uint32_t>& changed) {
  AllDropped dropped;
  {
    MutexLock lock(state_.mu);
    for (const uint32_t index : changed) state_.units.Drop(index, dropped);
    paused_ = false;
  }
  LetGoOf(dropped, tier_->engine());
}

void DeviceWeights::FetchExpected() {
  AllDropped dropped;
  Visit visit;
  {
    MutexLock lock(state_.mu);
    visit = state_.units.OnChange(dropped);
  }
  LetGoOf(dropped, tier_->engine());
  FetchAllAhead(visit);
}

WeightStats DeviceWeights::GetStats() const {
  MutexLock lock(state_.mu);
  WeightStats stats = state_.units.GetStats();
  if (target_ != nullptr) stats.excess_device_bytes = target_->excess_device_bytes();
  return stats;
}

}  // namespace pinion
