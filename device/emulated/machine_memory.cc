// The memory half of MachineCore: device allocations, who holds what, where memory lies.

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <utility>

#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/device/allocation_label.h"
#include "pinion/device/emulated/machine_core.h"

namespace pinion {
namespace {

// Freed memory reads as NaN in every floating-point type.
constexpr int kPoison = 0xFF;

uintptr_t Address(const void* data) { return reinterpret_cast<uintptr_t>(data); }

}  // namespace

absl::StatusOr<void*> MachineCore::Allocate(int device, uint64_t size_bytes, StreamHandle stream) {
  const std::string& label = AllocationLabel::Current();
  MutexLock lock(mu_);
  PINION_RETURN_IF_ERROR(Enter(device, DeviceCall::kAllocate, options_.preset.host_event_us));
  PINION_ASSIGN_OR_RETURN(const int slot, FindSlot(device, stream));
  if (size_bytes == 0) return absl::InvalidArgumentError("Allocate: size_bytes is 0");
  ReleaseHeld(device);
  void* data = nullptr;
  DeviceState& state = devices_[device];
  if (MakeRoom(device, size_bytes)) {
    PublishIdleStreams(device, slot);
    data = arenas_[device]->Allocate(size_bytes, slot, state.limit_bytes);
  }
  if (data == nullptr) {
    return absl::ResourceExhaustedError(
        DeviceName(device) + " is out of memory: asked for " + HumanBytes(size_bytes) +
        ", in use " + HumanBytes(state.memory.in_use_bytes) + " of " +
        HumanBytes(state.limit_bytes) + ". Held by:\n" + Report(device));
  }
  state.allocations[Address(data)] = {size_bytes, label, {}};
  ++state.memory.allocations;
  SetInUse(device, state.memory.in_use_bytes + size_bytes);
  state.memory.peak_bytes = std::max(state.memory.peak_bytes, state.memory.in_use_bytes);
  if (options_.detect_races) {
    detector_.AddMemory(data, size_bytes, ContextOf(slot), "the allocation");
  }
  return data;
}

absl::Status MachineCore::Free(int device, void* data, StreamHandle stream) {
  MutexLock lock(mu_);
  PINION_RETURN_IF_ERROR(CheckUsable(device));
  time_.Spend(options_.preset.host_event_us * 1e-3);
  PINION_ASSIGN_OR_RETURN(const int slot, FindSlot(device, stream));
  DeviceState& state = devices_[device];
  const auto it = state.allocations.find(Address(data));
  if (it == state.allocations.end()) {
    return absl::InvalidArgumentError(DeviceName(device) +
                                      ": Free of an address that is not allocated (freed twice?)");
  }
  Allocation allocation = std::move(it->second);
  state.allocations.erase(it);
  ++state.memory.frees;

  if (options_.detect_races) {
    std::vector<int> recorded;
    for (int other : allocation.recorded) recorded.push_back(ContextOf(other));
    detector_.RemoveMemory(data, ContextOf(slot), recorded, "the free");
    DeliverRaces();
  }

  std::vector<StreamPoint> until;
  bool forced = effects_.Force(time_.Tail(slot));
  if (!forced) until.push_back(time_.Tail(slot));
  for (int other : allocation.recorded) {
    until.push_back(time_.Tail(other));
    forced &= effects_.Force(until.back());
  }
  if (forced) std::memset(data, kPoison, allocation.size_bytes);
  state.held.push_back(
      {data, allocation.size_bytes, std::move(allocation.label), slot, std::move(until)});
  ReleaseHeld(device);
  return absl::OkStatus();
}

void MachineCore::SetInUse(int device, uint64_t bytes) const {
  devices_[device].memory.in_use_bytes = bytes;
  if (trace_ != nullptr) trace_->OnMemory(device, time_.now_ms(), bytes);
}

bool MachineCore::AllDone(const std::vector<StreamPoint>& points) const {
  for (StreamPoint point : points) {
    if (!time_.Done(point)) return false;
  }
  return true;
}

void MachineCore::ReleaseHeld(int device) const {
  DeviceState& state = devices_[device];
  std::vector<HeldMemory> still_held;
  for (HeldMemory& held : state.held) {
    if (AllDone(held.until)) {
      arenas_[device]->Free(held.data, held.size_bytes, held.stream);
      SetInUse(device, state.memory.in_use_bytes - held.size_bytes);
    } else {
      still_held.push_back(std::move(held));
    }
  }
  state.held = std::move(still_held);
}

// Waits, if need be, for streams that hold freed memory, as pools do before they give up.
bool MachineCore::MakeRoom(int device, uint64_t size_bytes) {
  DeviceState& state = devices_[device];
  const auto fits = [&state, size_bytes] {
    return size_bytes <= state.limit_bytes &&
           state.memory.in_use_bytes <= state.limit_bytes - size_bytes;
  };
  for (size_t i = 0; !fits() && i < state.held.size();) {
    const std::vector<StreamPoint> until = state.held[i].until;
    for (StreamPoint point : until) time_.RunUntil(point, TimeModel::kForever);
    if (AllDone(until)) {
      ReleaseHeld(device);  // all before `i` are stuck and stay
    } else {
      ++i;
    }
  }
  return fits();
}

// What was freed on a stream that has finished all its work may go to every stream.
void MachineCore::PublishIdleStreams(int device, int slot) {
  MemoryArena& arena = *arenas_[device];
  for (int other = 0; other < arena.stream_count(); ++other) {
    if (other != slot && time_.Done(time_.Tail(other))) arena.Publish(other);
  }
}

absl::Status MachineCore::RecordStream(const void* data, StreamHandle stream) {
  MutexLock lock(mu_);
  int device = -1;
  if (!IsDevicePointer(data, &device)) {
    return absl::InvalidArgumentError("RecordStream: not device memory");
  }
  PINION_RETURN_IF_ERROR(CheckUsable(device));
  const auto slot = slots_.find(stream.native());
  if (slot == slots_.end()) {
    return absl::InvalidArgumentError("RecordStream: no such stream");
  }
  std::map<uintptr_t, Allocation>& allocations = devices_[device].allocations;
  auto it = allocations.upper_bound(Address(data));
  if (it == allocations.begin() ||
      Address(data) >= std::prev(it)->first + std::prev(it)->second.size_bytes) {
    return absl::InvalidArgumentError("RecordStream: the memory is not allocated (freed?)");
  }
  std::prev(it)->second.recorded.insert(slot->second);
  return absl::OkStatus();
}

// --- Where memory lies ---

bool MachineCore::IsDevicePointer(const void* data, int* device) const {
  for (int i = 0; i < device_count(); ++i) {
    if (arenas_[i]->Contains(data)) {
      *device = i;
      return true;
    }
  }
  return false;
}

absl::StatusOr<MachineCore::Place> MachineCore::Locate(const void* data,
                                                       uint64_t size_bytes) const {
  Place place;
  if (!IsDevicePointer(data, &place.device)) {
    place.kind = InPinned(data, size_bytes) ? Place::kPinned : Place::kPageable;
    if (place.kind == Place::kPageable && TouchesPinned(data, size_bytes)) {
      return absl::InvalidArgumentError(HumanBytes(size_bytes) +
                                        " of host memory are not inside one pinned segment, nor "
                                        "wholly pageable");
    }
    return place;
  }
  place.kind = Place::kDevice;
  const std::map<uintptr_t, Allocation>& allocations = devices_[place.device].allocations;
  auto it = allocations.upper_bound(Address(data));
  const bool inside =
      it != allocations.begin() &&
      Address(data) + size_bytes <= std::prev(it)->first + std::prev(it)->second.size_bytes;
  if (inside) return place;
  return absl::InvalidArgumentError(HumanBytes(size_bytes) + " of memory of " +
                                    DeviceName(place.device) +
                                    " are not inside one live allocation (used after a free?)");
}

// --- Who holds what ---

MemoryStats MachineCore::memory_stats(int device) const {
  MutexLock lock(mu_);
  ReleaseHeld(device);
  MemoryStats stats = devices_[device].memory;
  stats.limit_bytes = devices_[device].limit_bytes;
  return stats;
}

void MachineCore::ResetPeakMemory(int device) {
  MutexLock lock(mu_);
  ReleaseHeld(device);
  devices_[device].memory.peak_bytes = devices_[device].memory.in_use_bytes;
}

absl::Status MachineCore::SetMemoryLimit(int device, uint64_t limit_bytes) {
  MutexLock lock(mu_);
  if (limit_bytes > 2 * options_.memory_bytes) {
    return absl::InvalidArgumentError(
        "SetMemoryLimit: " + HumanBytes(limit_bytes) + " is more than twice memory_bytes (" +
        HumanBytes(options_.memory_bytes) + "); create the machine with more");
  }
  devices_[device].limit_bytes = limit_bytes;
  return absl::OkStatus();
}

std::string MachineCore::MemoryReport(int device) const {
  MutexLock lock(mu_);
  ReleaseHeld(device);
  return Report(device);
}

std::string MachineCore::Report(int device) const {
  struct Holder {
    uint64_t size_bytes = 0;
    uint64_t allocations = 0;
  };
  std::map<std::string, Holder> holders;
  const auto add = [&holders](const std::string& name, uint64_t size_bytes) {
    Holder& holder = holders[name];
    holder.size_bytes += size_bytes;
    ++holder.allocations;
  };
  for (const auto& [address, allocation] : devices_[device].allocations) {
    add(allocation.label.empty() ? "(no label)" : allocation.label, allocation.size_bytes);
  }
  for (const HeldMemory& held : devices_[device].held) {
    add("freed, but recorded streams are not done", held.size_bytes);
  }
  std::vector<std::pair<std::string, Holder>> sorted(holders.begin(), holders.end());
  std::stable_sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) {
    return a.second.size_bytes > b.second.size_bytes;
  });
  std::string report;
  for (const auto& [name, holder] : sorted) {
    report += "  " + name + " " + HumanBytes(holder.size_bytes) + " (" +
              std::to_string(holder.allocations) +
              (holder.allocations == 1 ? " allocation)\n" : " allocations)\n");
  }
  return report;
}

}  // namespace pinion
