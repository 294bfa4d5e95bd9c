// What an emulated machine and its devices share: one mutex, the parts that it guards, and the
// steps in which several parts have a say. EmulatedMachine and EmulatedDevice hold the mutex
// through a whole call.
//
//   Simulation     what is submitted: its time, its bytes, its order
//   HandleTable    streams and events
//   DeviceHeap     a device's memory; PinnedRanges: the host's
//   FaultInjector  which calls fail
//   MachineTrace   the timeline, if it is kept
//
// Nothing outside this directory includes this file.

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

  struct Place {            // where one end of a copy lies
    int device = -1;        // -1: the host
    bool pageable = false;  // host memory that is not pinned
  };

  MachineCore(const EmulatedOptions& options, std::vector<std::unique_ptr<MemoryArena>> arenas);

  // What every call begins with: the latched error, the call's cost, effects that happen to happen
  // now, and the fault plan.
  absl::Status Enter(int device, DeviceCall call, double cost_us) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Enter, for a call that pins.
  absl::Status EnterPin(int device, uint64_t size_bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Advances the host's clock by the arithmetic that the calling thread has counted
  // (device/host_arithmetic.h), and adds it to the device's statistics. Enter begins with it.
  void SpendOnArithmetic(int device) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);

  StreamHandle AddStream(int device, const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Pageable memory (`pageable`) is slower, and blocks the host.
  absl::Status SubmitCopy(int slot, std::string name, std::vector<CopyPiece> pieces, CopyCost cost,
                          bool pageable) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);

  // The device whose memory `data` lies in, or -1.
  int DeviceOf(const void* data) const;
  // Where [data, data + size_bytes) lies. InvalidArgument for null, for device memory that is not
  // allocated, and for ranges that leave their allocation or their pinned segment.
  absl::StatusOr<Place> Locate(const void* data, uint64_t size_bytes) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);

  const EmulatedOptions options;
  const std::vector<std::unique_ptr<MemoryArena>> arenas;  // Contains() without the lock

  Mutex mu;
  // Null unless EmulatedOptions::record_trace.
  const std::unique_ptr<MachineTrace> trace ABSL_PT_GUARDED_BY(mu);
  Simulation simulation ABSL_GUARDED_BY(mu);
  HandleTable handles ABSL_GUARDED_BY(mu);
  std::vector<DeviceHeap> heaps ABSL_GUARDED_BY(mu);  // by device
  PinnedRanges pinned ABSL_GUARDED_BY(mu);
  FaultInjector faults ABSL_GUARDED_BY(mu);
  std::vector<StreamHandle> default_streams;  // by device; fixed once the core is made
};

}  // namespace pinion

#endif  // PINION_DEVICE_EMULATED_MACHINE_CORE_H_
