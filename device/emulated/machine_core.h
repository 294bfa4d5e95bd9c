// Shared state of an emulated machine and its devices, guarded by one mutex.
//
//   Simulation     submitted work: its time, its bytes, its order
//   HandleTable    streams and events
//   DeviceHeap     a device's memory; PinnedRanges: the host's
//   FaultInjector  failing calls
//   MachineTrace   the timeline, if it is recorded
//
// EmulatedMachine and EmulatedDevice hold the mutex for a whole call. Private to this directory.

#ifndef PINION_DEVICE_EMULATED_MACHINE_CORE_H_
#define PINION_DEVICE_EMULATED_MACHINE_CORE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/device_heap.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/device/emulated/engines.h"
#include "pinion/device/emulated/faults.h"
#include "pinion/device/emulated/handle_table.h"
#include "pinion/device/emulated/machine_trace.h"
#include "pinion/device/emulated/memory_arena.h"
#include "pinion/device/emulated/pinned_ranges.h"
#include "pinion/device/emulated/simulation.h"

namespace pinion {

struct MachineCore {
  // Pinned memory comes in whole pages.
  static constexpr uint64_t kPageBytes = 4096;

  struct Place {            // location of a copy's end
    int device = -1;        // -1: the host
    bool pageable = false;  // unpinned host memory
  };

  MachineCore(const EmulatedOptions& options, std::vector<std::unique_ptr<MemoryArena>> arenas);

  // Begins a call: checks the index and the latched error, charges the cost, applies random
  // effects, and counts the call for the fault plan.
  absl::Status Enter(int device, DeviceCall call, double cost_us) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Begins a call that pins `size_bytes`.
  absl::Status EnterPin(int device, uint64_t size_bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Advances the host's clock by the arithmetic that the calling thread has counted
  // (device/host_arithmetic.h), and adds it to the device's statistics. Enter begins with it.
  void SpendOnArithmetic(int device) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);

  StreamHandle AddStream(int device, const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Submits a copy. Pageable memory is slower and blocks the host.
  absl::Status SubmitCopy(int slot, std::string name, std::vector<CopyPiece> pieces, CopyCost cost,
                          bool pageable) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);

  // Returns the device whose memory contains `data`, or -1.
  int DeviceOf(const void* data) const;
  // Returns the location of [data, data + size_bytes). InvalidArgument for null, for unallocated
  // device memory, and for ranges that leave their allocation or pinned segment.
  absl::StatusOr<Place> Locate(const void* data, uint64_t size_bytes) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);

  const EmulatedOptions options;
  const std::vector<std::unique_ptr<MemoryArena>> arenas;  // Contains() needs no lock

  Mutex mu;
  // Null without EmulatedOptions::record_trace.
  const std::unique_ptr<MachineTrace> trace ABSL_PT_GUARDED_BY(mu);
  Simulation simulation ABSL_GUARDED_BY(mu);
  HandleTable handles ABSL_GUARDED_BY(mu);
  std::vector<DeviceHeap> heaps ABSL_GUARDED_BY(mu);  // by device
  PinnedRanges pinned ABSL_GUARDED_BY(mu);
  FaultInjector faults ABSL_GUARDED_BY(mu);
  std::vector<StreamHandle> default_streams;  // by device; constant after construction
};

}  // namespace pinion

#endif  // PINION_DEVICE_EMULATED_MACHINE_CORE_H_
