// The emulated machine itself: one mutex around the models that the other files are.
//
//   time_model        when things happen
//   deferred_effects  when bytes move
//   race_detector     what nothing orders
//   host_protection   which host pages the CPU must leave alone, if asked for
//   memory_arena      addresses; fault_injector and machine_trace as their names say
//
// A stream is known to all of them by the same small number, its slot; the race detector's
// contexts are slots + 1, since its context 0 is the host. Each entry of a stream has the same
// sequence number everywhere (StreamPoint).
//
// Nothing outside this directory includes this file.

#ifndef PINION_DEVICE_EMULATED_MACHINE_CORE_H_
#define PINION_DEVICE_EMULATED_MACHINE_CORE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/deferred_effects.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/device/emulated/faults.h"
#include "pinion/device/emulated/host_protection.h"
#include "pinion/device/emulated/machine_trace.h"
#include "pinion/device/emulated/memory_arena.h"
#include "pinion/device/emulated/race_detector.h"
#include "pinion/device/emulated/time_model.h"
#include "pinion/device/trace/trace_sink.h"

namespace pinion {

class MachineCore : public EmulatedMachine, public std::enable_shared_from_this<MachineCore> {
 public:
  MachineCore(const EmulatedOptions& options, std::vector<std::unique_ptr<MemoryArena>> arenas);
  ~MachineCore() override;

  // EmulatedMachine.
  const EmulatedOptions& options() const override { return options_; }
  int device_count() const override { return options_.device_count; }
  std::shared_ptr<Device> device(int index) override;
  StreamHandle default_stream(int device) override;
  absl::Status PrepareKernel(int device, StreamHandle stream) override;
  absl::Status Launch(int device, StreamHandle stream, const Kernel& kernel) override;
  absl::Status Copy(int device, void* dst, const void* src, uint64_t size_bytes,
                    StreamHandle stream) override;
  absl::Status RecordStream(const void* data, StreamHandle stream) override;
  absl::Status HostAccess(const void* data, uint64_t size_bytes, bool write) override;
  absl::Status RegisterHost(int device, void* data, uint64_t size_bytes) override;
  absl::Status UnregisterHost(int device, void* data) override;
  absl::Status SynchronizeDevice(int device) override;
  double now_ms() const override;
  MemoryStats memory_stats(int device) const override;
  void ResetPeakMemory(int device) override;
  TimeStats time_stats(int device) const override;
  void ResetTimeStats(int device) override;
  std::string MemoryReport(int device) const override;
  absl::Status SetMemoryLimit(int device, uint64_t limit_bytes) override;
  bool IsDevicePointer(const void* data, int* device) const override;
  bool IsPinned(const void* data) const override;
  std::vector<std::string> races() const override;
  uint64_t calls(DeviceCall call) const override;
  absl::Status SetCapturing(StreamHandle stream, bool capturing) override;
  void BreakDevice(int device, const std::string& error) override;
  std::shared_ptr<TraceSink> trace() override;
  void RestartTrace() override;
  absl::Status WriteChromeTrace(const std::string& path) const override;

  // Host ranges, by trace().
  void BeginRange(const char* name, uint64_t size_bytes);
  void EndRange();

  // Device, by index.
  std::string DeviceName(int device) const;
  absl::StatusOr<void*> Allocate(int device, uint64_t size_bytes, StreamHandle stream);
  absl::Status Free(int device, void* data, StreamHandle stream);
  absl::StatusOr<HostSegment> AllocatePinned(int device, uint64_t size_bytes);
  absl::Status FreePinned(int device, const HostSegment& segment);
  absl::StatusOr<StreamHandle> CreateStream(int device, const std::string& name);
  absl::Status DestroyStream(int device, StreamHandle stream);
  absl::Status SynchronizeStream(int device, StreamHandle stream);
  absl::StatusOr<bool> IsCapturing(int device, StreamHandle stream);
  DeviceInfo Info(int device) const;
  absl::StatusOr<EventHandle> CreateEvent(int device, bool timed);
  absl::Status DestroyEvent(int device, EventHandle event);
  absl::Status RecordEvent(int device, EventHandle event, StreamHandle stream);
  absl::Status StreamWaitEvent(int device, StreamHandle stream, EventHandle event);
  absl::StatusOr<bool> QueryEvent(int device, EventHandle event);
  absl::Status WaitEvent(int device, EventHandle event, absl::Duration timeout);
  absl::StatusOr<double> ElapsedMs(int device, EventHandle start, EventHandle end);
  absl::Status CopyAsync(int device, CopyDirection direction, absl::Span<const CopyPiece> pieces,
                         StreamHandle stream);

 private:
  struct StreamState {
    int device = 0;
    std::string name;
    bool capturing = false;
  };
  struct EventState {
    int device = 0;
    bool recorded = false;
    bool captured = false;  // by its last record
    StreamPoint point;
    VectorClock clock;
    // Of the last record; negative until it is done. Null: without timing.
    std::shared_ptr<double> time_ms;
  };
  struct Allocation {
    uint64_t size_bytes = 0;
    std::string label;
    std::set<int> recorded;  // slots of RecordStream
  };
  // Freed, but the streams have not come that far yet.
  struct HeldMemory {
    void* data = nullptr;
    uint64_t size_bytes = 0;
    std::string label;
    int stream = 0;
    std::vector<StreamPoint> until;
  };
  struct DeviceState {
    std::string sticky_error;  // "" while the device works
    uint64_t limit_bytes = 0;
    MemoryStats memory;
    std::map<uintptr_t, Allocation> allocations;
    std::vector<HeldMemory> held;
    StreamHandle default_stream;
  };
  struct Place {  // where one end of a copy lies
    enum Kind { kDevice, kPinned, kPageable } kind = kPageable;
    int device = -1;  // -1: the host
  };

  std::unique_ptr<TraceSink> NewRanges();

  // What every call begins with: the latched error, the fault plan, the call's cost, and (by
  // EffectSchedule) effects that happen to happen now.
  absl::Status Enter(int device, DeviceCall call, double cost_us)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CheckUsable(int device) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  absl::StatusOr<int> FindSlot(int device, StreamHandle stream) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<EventState*> FindEvent(EventHandle event) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  StreamHandle AddStream(int device, const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  static int ContextOf(int slot) { return slot + 1; }

  // The host has seen that `point`, which is done, is: forces its effects, joins `clock`, and opens
  // the host pages of the copies that it covers.
  void Observe(StreamPoint point, const VectorClock& clock) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Passes time until `point` is done. Unavailable, saying why, if it never will be.
  absl::Status BlockUntil(StreamPoint point) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status Synchronize(int slot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void AfterSubmission(StreamPoint point) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void DeliverRaces() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  absl::Status SubmitCopy(int slot, std::string name, std::vector<CopyPiece> pieces,
                          TimeModel::CopyCost cost, bool pageable)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status SubmitCopyInside(int slot, const CopyPiece& piece)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Where [data, data + size_bytes) lies. InvalidArgument for device memory that is not allocated,
  // and for ranges that leave their allocation or their pinned segment.
  absl::StatusOr<Place> Locate(const void* data, uint64_t size_bytes) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool InPinned(const void* data, uint64_t size_bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool TouchesPinned(const void* data, uint64_t size_bytes) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void AddPinned(void* data, uint64_t size_bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status RemovePinned(void* data) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  bool AllDone(const std::vector<StreamPoint>& points) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ReleaseHeld(int device) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool MakeRoom(int device, uint64_t size_bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void PublishIdleStreams(int device, int slot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::string Report(int device) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void SetInUse(int device, uint64_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Enter, for a call that pins.
  absl::Status EnterPin(int device, uint64_t size_bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const EmulatedOptions options_;
  const std::vector<std::unique_ptr<MemoryArena>> arenas_;  // Contains() without the lock
  std::vector<std::unique_ptr<Device>> facades_;
  const std::unique_ptr<TraceSink> ranges_;

  mutable Mutex mu_;
  TimeModel time_ ABSL_GUARDED_BY(mu_);
  DeferredEffects effects_ ABSL_GUARDED_BY(mu_);
  RaceDetector detector_ ABSL_GUARDED_BY(mu_);
  // Null unless EmulatedOptions::protect_host_pages.
  const std::unique_ptr<HostProtection> protection_ ABSL_PT_GUARDED_BY(mu_);
  FaultInjector faults_ ABSL_GUARDED_BY(mu_);
  // Null unless EmulatedOptions::record_trace.
  const std::unique_ptr<MachineTrace> trace_ ABSL_PT_GUARDED_BY(mu_);
  std::vector<std::string> races_ ABSL_GUARDED_BY(mu_);
  std::vector<StreamState> streams_ ABSL_GUARDED_BY(mu_);      // by slot
  std::unordered_map<void*, int> slots_ ABSL_GUARDED_BY(mu_);  // by native stream handle
  std::unordered_map<void*, EventState> events_ ABSL_GUARDED_BY(mu_);
  uintptr_t next_handle_ ABSL_GUARDED_BY(mu_) = 0x1000;
  mutable std::vector<DeviceState> devices_ ABSL_GUARDED_BY(mu_);
  std::map<uintptr_t, uint64_t> pinned_ ABSL_GUARDED_BY(mu_);  // segments: address, size
};

}  // namespace pinion

#endif  // PINION_DEVICE_EMULATED_MACHINE_CORE_H_
