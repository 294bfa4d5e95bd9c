// One emulated device's memory: what is allocated, by whom, and what was freed while streams that
// use it had not come that far.
//
// Thread safety: none; the machine's mutex guards it.

#ifndef PINION_DEVICE_EMULATED_DEVICE_HEAP_H_
#define PINION_DEVICE_EMULATED_DEVICE_HEAP_H_

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/device/emulated/machine_trace.h"
#include "pinion/device/emulated/memory_arena.h"
#include "pinion/device/emulated/simulation.h"

namespace pinion {

class DeviceHeap {
 public:
  // The others outlive the heap. `trace` may be null.
  DeviceHeap(int device, uint64_t limit_bytes, MemoryArena* arena, Simulation* simulation,
             MachineTrace* trace);

  // Ordered by the stream `slot`. Waits, if need be, for streams that hold freed memory, as pools
  // do before they give up; ResourceExhausted then says who holds what.
  absl::StatusOr<void*> Allocate(uint64_t size_bytes, const std::string& label, int slot);
  absl::Status Free(void* data, int slot);
  // A use of the allocation that `data` lies in by another stream: Free waits for it.
  absl::Status RecordStream(const void* data, int slot);
  // True if [data, data + size_bytes) lies in one allocation.
  bool Contains(const void* data, uint64_t size_bytes) const;

  void SetLimit(uint64_t limit_bytes) { stats_.limit_bytes = limit_bytes; }
  MemoryStats GetStats();
  void ResetPeak();
  std::string Report();  // EmulatedMachine::MemoryReport
  void TraceInUse();     // the number, at this time

 private:
  struct Allocation {
    uint64_t size_bytes = 0;
    std::string label;
    std::set<int> recorded;  // slots of RecordStream
  };
  using Allocations = std::map<uintptr_t, Allocation>;
  // Freed, but the streams have not come that far yet.
  struct HeldMemory {
    void* data = nullptr;
    uint64_t size_bytes = 0;
    int slot = 0;
    std::vector<StreamPoint> until;
  };

  // The allocation that [data, data + size_bytes) lies in, or the end.
  Allocations::const_iterator Find(const void* data, uint64_t size_bytes) const;
  bool AllDone(const std::vector<StreamPoint>& points) const;
  void ReleaseHeld();
  bool MakeRoom(uint64_t size_bytes);
  void SetInUse(uint64_t bytes);

  const int device_;
  MemoryArena* const arena_;
  Simulation* const simulation_;
  MachineTrace* const trace_;
  MemoryStats stats_;
  Allocations allocations_;
  std::vector<HeldMemory> held_;
};

}  // namespace pinion

#endif  // PINION_DEVICE_EMULATED_DEVICE_HEAP_H_
