#include "pinion/device/emulated/device_heap.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "pinion/allocator/base/bytes.h"
#include "pinion/device/allocation_bytes.h"
#include "pinion/device/emulated/engines.h"

namespace pinion {
namespace {

// Freed memory reads as NaN in every floating-point type.
constexpr int kPoison = 0xFF;

constexpr char kHostRefuses[] =
    "; the host refuses memory for it: set vm.overcommit_memory to 0 or 1, raise the limit of "
    "writable memory (ulimit -d), or lower EmulatedOptions::memory_bytes";

uintptr_t Address(const void* data) { return reinterpret_cast<uintptr_t>(data); }

}  // namespace

DeviceHeap::DeviceHeap(int device, uint64_t limit_bytes, MemoryArena* arena, Simulation* simulation,
                       MachineTrace* trace)
    : device_(device), arena_(arena), simulation_(simulation), trace_(trace) {
  stats_.limit_bytes = limit_bytes;
}

absl::StatusOr<void*> DeviceHeap::Allocate(uint64_t size_bytes, const std::string& label,
                                           int slot) {
  if (size_bytes == 0)
    return absl::InvalidArgumentError("Allocate: size_bytes is 0: ask for one or more");
  ReleaseHeld();
  void* data = nullptr;
  const bool fits = size_bytes <= stats_.limit_bytes && MakeRoom(AllocationBytes(size_bytes));
  if (fits) {
    // Memory freed on an idle stream may serve every stream.
    const TimeModel& time = simulation_->time();
    for (int other = 0; other < arena_->stream_count(); ++other) {
      if (other != slot && time.Done(time.Tail(other))) arena_->Publish(other);
    }
    data = arena_->Allocate(size_bytes, slot, stats_.limit_bytes);
  }
  if (data == nullptr) {
    return absl::ResourceExhaustedError(
        EmulatedDeviceName(device_) + " is out of memory: asked for " + HumanBytes(size_bytes) +
        ", in use " + HumanBytes(stats_.in_use_bytes) + " of " + HumanBytes(stats_.limit_bytes) +
        (fits ? kHostRefuses : "") + ". Held by:\n" + Report());
  }
  allocations_[Address(data)] = {size_bytes, label, {}};
  ++stats_.allocations;
  SetInUse(stats_.in_use_bytes + AllocationBytes(size_bytes));
  stats_.allocated_bytes += AllocationBytes(size_bytes);
  stats_.peak_bytes = std::max(stats_.peak_bytes, stats_.in_use_bytes);
  simulation_->AddMemory(data, size_bytes, slot, "the allocation");
  return data;
}

absl::Status DeviceHeap::Free(void* data, int slot) {
  const auto it = allocations_.find(Address(data));
  if (it == allocations_.end()) {
    return absl::InvalidArgumentError(EmulatedDeviceName(device_) +
                                      ": Free of an address that is not allocated (freed twice?)");
  }
  const Allocation allocation = std::move(it->second);
  allocations_.erase(it);
  ++stats_.frees;
  simulation_->RemoveMemory(data, slot, allocation.recorded, "the free");

  const TimeModel& time = simulation_->time();
  std::vector<StreamPoint> until;
  bool forced = simulation_->Force(time.Tail(slot));
  if (!forced) until.push_back(time.Tail(slot));
  for (int other : allocation.recorded) {
    until.push_back(time.Tail(other));
    forced &= simulation_->Force(until.back());
  }
  if (forced) std::memset(data, kPoison, allocation.size_bytes);
  held_.push_back({data, allocation.size_bytes, slot, std::move(until)});
  ReleaseHeld();
  return absl::OkStatus();
}

absl::Status DeviceHeap::RecordStream(const void* data, int slot) {
  const auto it = Find(data, 1);
  if (it == allocations_.end()) {
    return absl::InvalidArgumentError("RecordStream: the memory is not allocated (freed?)");
  }
  allocations_[it->first].recorded.insert(slot);
  ++stats_.streams_recorded;
  return absl::OkStatus();
}

bool DeviceHeap::Contains(const void* data, uint64_t size_bytes) const {
  return Find(data, size_bytes) != allocations_.end();
}

DeviceHeap::Allocations::const_iterator DeviceHeap::Find(const void* data,
                                                         uint64_t size_bytes) const {
  auto it = allocations_.upper_bound(Address(data));
  if (it == allocations_.begin()) return allocations_.end();
  --it;
  const uint64_t offset = Address(data) - it->first;
  const uint64_t allocated_bytes = it->second.size_bytes;
  const bool inside = offset <= allocated_bytes && size_bytes <= allocated_bytes - offset;
  return inside ? it : allocations_.end();
}

void DeviceHeap::SetInUse(uint64_t bytes) {
  stats_.in_use_bytes = bytes;
  TraceInUse();
}

void DeviceHeap::TraceInUse() {
  if (trace_ == nullptr) return;
  trace_->OnMemory(device_, simulation_->time().now_ms(), stats_.in_use_bytes);
}

bool DeviceHeap::AllDone(const std::vector<StreamPoint>& points) const {
  return std::all_of(points.begin(), points.end(),
                     [this](StreamPoint point) { return simulation_->time().Done(point); });
}

void DeviceHeap::ReleaseHeld() {
  std::vector<HeldMemory> still_held;
  for (HeldMemory& held : held_) {
    if (AllDone(held.until)) {
      arena_->Free(held.data, held.size_bytes, held.slot);
      SetInUse(stats_.in_use_bytes - AllocationBytes(held.size_bytes));
    } else {
      still_held.push_back(std::move(held));
    }
  }
  held_ = std::move(still_held);
}

bool DeviceHeap::MakeRoom(uint64_t size_bytes) {
  const auto fits = [this, size_bytes] {
    return size_bytes <= stats_.limit_bytes &&
           stats_.in_use_bytes <= stats_.limit_bytes - size_bytes;
  };
  for (size_t i = 0; !fits() && i < held_.size();) {
    const std::vector<StreamPoint> until = held_[i].until;
    for (StreamPoint point : until) simulation_->time().RunUntil(point, kForever);
    if (AllDone(until)) {
      ReleaseHeld();  // the entries before `i` are stuck, and stay
    } else {
      ++i;
    }
  }
  return fits();
}

MemoryStats DeviceHeap::GetStats() {
  ReleaseHeld();
  return stats_;
}

void DeviceHeap::ResetPeak() { stats_.peak_bytes = GetStats().in_use_bytes; }

std::string DeviceHeap::Report() {
  ReleaseHeld();
  struct Holder {
    uint64_t size_bytes = 0;
    uint64_t allocations = 0;
  };
  std::map<std::string, Holder> holders;
  const auto add = [&holders](const std::string& name, uint64_t size_bytes) {
    holders[name].size_bytes += AllocationBytes(size_bytes);
    ++holders[name].allocations;
  };
  for (const auto& [address, allocation] : allocations_) {
    add(allocation.label.empty() ? "(no label)" : allocation.label, allocation.size_bytes);
  }
  for (const HeldMemory& held : held_) {
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
