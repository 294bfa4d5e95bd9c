#include "pinion/hooks/weights/device_units.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "pinion/allocator/base/check.h"
#include "pinion/hooks/tier/torch_memory.h"

namespace pinion {
namespace {

PrefetchLimits LimitsOf(const std::vector<UnitParcel>& units, uint64_t window_bytes) {
  PrefetchLimits limits = {.sizes_bytes = {}, .window_bytes = window_bytes};
  for (const UnitParcel& unit : units) limits.sizes_bytes.push_back(unit.size_bytes());
  return limits;
}

}  // namespace

const MasterWatch* UnitParcel::Changed(bool in_backward) const {
  const auto changed = std::find_if(
      masters.begin(), masters.end(), [in_backward](const std::shared_ptr<MasterWatch>& master) {
        return in_backward ? master->HasNewVersion() : master->HasChangedInForward();
      });
  return changed == masters.end() ? nullptr : changed->get();
}

std::vector<c10::DataPtr> UnitParcel::PointTo(void* data, ResidencyKeeper& keeper,
                                              c10::Device device) const {
  std::vector<c10::DataPtr> before;
  for (const WeightPiece& piece : pieces) {
    const auto storage = piece.storage.lock();
    if (!storage) continue;
    char* const begin = data == nullptr ? nullptr : static_cast<char*>(data) + piece.offset_bytes;
    before.push_back(storage->set_data_ptr(StreamedData(begin, keeper.shared_from_this(), device)));
  }
  return before;
}

void FreeDropped(AllDropped& dropped, TransferEngine& engine) {
  for (DroppedWeights& drop : dropped) {
    const StreamHandle owner = drop.memory.stream();
    for (const BoundStream& stream : drop.streams) {
      if (stream.native == owner) continue;
      const absl::Status ordered =
          engine.OrderStreams(stream.native, owner, kWeightUsedOnOtherStream);
      if (ordered.ok()) continue;
      PINION_LOG(kWarning) << "the memory of weights is not given back: " << ordered.ToString();
      c10::Storage leaked = StorageOf(drop.memory.memory());
      leaked.unsafeReleaseStorageImpl();
      break;
    }
  }
  dropped.clear();
}

bool DeviceUnit::IsReadyOn(const BoundStream& stream) const {
  return std::any_of(streams.begin(), streams.end(),
                     [&](const BoundStream& s) { return s.torch == stream.torch; });
}

DeviceUnits::DeviceUnits(std::vector<UnitParcel> units, const WeightRoom& room,
                         ResidencyKeeper& keeper, c10::Device device)
    : keeper_(keeper), device_(device), prefetcher_(LimitsOf(units, room.window_bytes)) {
  stats_.two_largest_bytes = room.two_largest_bytes;
  for (UnitParcel& unit : units) {
    unit.parcel->AddReaders(1);
    units_.push_back({.parts = std::move(unit), .bytes = {}, .memory = {}, .streams = {}});
  }
}

WeightStats DeviceUnits::GetStats() const {
  WeightStats stats = stats_;
  stats.resident_bytes = prefetcher_.resident_bytes();
  return stats;
}

// ------------------------------------------------------------------------------------------- use

PrefetchPlan DeviceUnits::OnUse(uint32_t index, AllDropped& dropped) {
  ++units_[index].users;
  return Begin(prefetcher_.OnUse(index, [this](uint32_t other) { return MayDrop(other); }),
               dropped);
}

PrefetchPlan DeviceUnits::OnUsed(uint32_t index, AllDropped& dropped) {
  --units_[index].users;
  return Begin(prefetcher_.OnUsed(index, [this](uint32_t other) { return MayDrop(other); }),
               dropped);
}

void DeviceUnits::CancelUse(uint32_t index, const PrefetchPlan& plan) {
  --units_[index].users;
  for (const uint32_t other : plan.fetches) {
    EndFetch(other);
    NoteFailure(other);
  }
}

PrefetchPlan DeviceUnits::OnChange(AllDropped& dropped) {
  return Begin(prefetcher_.OnChange([this](uint32_t other) { return MayDrop(other); }), dropped);
}

bool DeviceUnits::MayDrop(uint32_t index) const {
  const DeviceUnit& unit = units_[index];
  return unit.users == 0 && unit.parts.parcel->state() != Parcel::State::kFetching;
}

PrefetchPlan DeviceUnits::Begin(PrefetchPlan plan, AllDropped& dropped) {
  for (const uint32_t other : plan.evictions) Drop(other, dropped);
  for (const uint32_t other : plan.fetches) ++units_[other].users;
  return plan;
}

// ------------------------------------------------------------------------------------- copies in

void DeviceUnits::CountFetch(uint64_t size_bytes, bool is_ahead) {
  ++stats_.fetches;
  stats_.fetched_ahead += is_ahead ? 1 : 0;
  stats_.fetched_bytes += size_bytes;
}

void DeviceUnits::OnFetchRefused(uint32_t index, bool was_tried) {
  stats_.fetches_refused += was_tried ? 1 : 0;
  NoteFailure(index);
}

void DeviceUnits::NoteFailure(uint32_t index) {
  const DeviceUnit& unit = units_[index];
  if (unit.parts.parcel->state() == Parcel::State::kAway) prefetcher_.OnEvicted(index);
}

std::vector<c10::DataPtr> DeviceUnits::OnArrived(uint32_t index, const BoundStream& stream,
                                                 GuardedMemory& fetched) {
  DeviceUnit& unit = units_[index];
  unit.NoteReadyOn(stream);
  if (unit.memory) return {};
  unit.memory = std::move(fetched);
  prefetcher_.OnFetched(index);
  return unit.parts.PointTo(unit.memory.memory().data(), keeper_, device_);
}

// ------------------------------------------------------------------------------------------ out

void DeviceUnits::Drop(uint32_t index, AllDropped& dropped) {
  DeviceUnit& unit = units_[index];
  prefetcher_.OnEvicted(index);
  GuardedMemory fetched = unit.parts.parcel->TakeFetched();
  if (!fetched) return;
  ++stats_.drops;
  std::vector<c10::DataPtr> data;
  if (unit.memory) data = unit.parts.PointTo(nullptr, keeper_, device_);
  unit.memory.Disarm();  // `fetched` refers to the same memory
  dropped.push_back({.bytes = std::exchange(unit.bytes, {}),
                     .memory = std::move(fetched),
                     .streams = std::exchange(unit.streams, {}),
                     .data = std::move(data)});
}

bool DeviceUnits::IsAnyInUse() const {
  return std::any_of(units_.begin(), units_.end(),
                     [](const DeviceUnit& unit) { return unit.users > 0; });
}

void DeviceUnits::DropAllIdle(AllDropped& dropped) {
  for (uint32_t index = 0; index < units_.size(); ++index) {
    if (MayDrop(index)) Drop(index, dropped);
  }
}

}  // namespace pinion
