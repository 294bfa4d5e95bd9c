// Tracks one emulated device's memory: live allocations, their labels, and freed memory that
// streams still use.
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
  // The pointers outlive the heap. `trace` may be null.
  DeviceHeap(int device, uint64_t limit_bytes, MemoryArena* arena, Simulation* simulation,
             MachineTrace* trace);

  // Allocates memory for the stream `slot`. Before it gives up, it waits for streams that still use
  // freed memory, as pools do. ResourceExhausted then lists the memory's users.
  absl::StatusOr<void*> Allocate(uint64_t size_bytes, const std::string& label, int slot);
  absl::Status Free(void* data, int slot);
  // Records that another stream uses the allocation at `data`: Free waits for that stream.
  absl::Status RecordStream(const void* data, int slot);
  // Returns true if [data, data + size_bytes) lies in one allocation.
  bool Contains(const void* data, uint64_t size_bytes) const;

  void SetLimit(uint64_t limit_bytes) { stats_.limit_bytes = limit_bytes; }
  MemoryStats GetStats();
  void ResetPeak();
  std::string Report();  // as EmulatedMachine::MemoryReport
  void TraceInUse();     // records the bytes in use at this time

 private:
  struct Allocation {
    uint64_t size_bytes = 0;
    std::string label;
    std::set<int> recorded;  // slots of RecordStream
  };
  using Allocations = std::map<uintptr_t, Allocation>;
  // Freed memory whose recorded streams are not done.
  struct HeldMemory {
    void* data = nullptr;
    uint64_t size_bytes = 0;
    int slot = 0;
    std::vector<StreamPoint> until;
  };

  // Returns the allocation that contains [data, data + size_bytes), or end().
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
