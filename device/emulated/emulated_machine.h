// The emulated accelerator: a host with n devices, simulated as discrete events.
//
//   EmulatedOptions options;
//   options.device_count = 2;
//   options.preset = *FindPreset("h100_pcie5");
//   PINION_ASSIGN_OR_RETURN(auto machine, EmulatedMachine::Create(options));
//   Device& device = *machine->device(0);
//
// Three separate things happen to what is submitted:
//   values  Real bytes move. A copy is deferred and reads its source when it takes effect; the
//           schedule decides when, among all legal moments. A kernel runs at once on the host,
//           after the effects of all that it is ordered after.
//   races   Vector clocks over byte ranges. Two accesses, one of them a write, that no event or
//           stream orders are an error, whatever order the bytes took: it names both accesses,
//           their streams and the missing edge.
//   time    Virtual. The host clock H rises by each call's cost and by blocking waits; kernels and
//           copies take what the preset's cost model says; links are shared as fluids.
//
// There are no threads here: all of it happens inside the calls. All host threads share one host
// clock (docs/decisions): an order among host threads is taken for granted, TSan's job.
//
// Errors: a device that there is not is InvalidArgument, and ends the process in calls that return
// no status.
// Thread safety: thread-safe (one mutex). Times are exact and repeatable when one host thread is
// active at a time.
// Ownership: devices live as long as the machine; keep the shared_ptr.

#ifndef PINION_DEVICE_EMULATED_EMULATED_MACHINE_H_
#define PINION_DEVICE_EMULATED_EMULATED_MACHINE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/device/emulated/faults.h"
#include "pinion/device/emulated/time_stats.h"
#include "pinion/device/trace/trace_sink.h"

namespace pinion {

// When a deferred copy takes effect, among the moments that its dependencies allow.
enum class EffectSchedule {
  kEarly,   // as soon as what it depends on has taken effect
  kLate,    // only when something that depends on it, or an observation, forces it
  kRandom,  // the seed decides at each call
};

// What Allocate may hand out after a Free.
enum class ReuseMode {
  kImmediate,   // last in, first out: recycled addresses, as a caching allocator does
  kQuarantine,  // an address comes back as late as capacity allows
};

struct EmulatedOptions {
  int device_count = 1;
  uint64_t memory_bytes = uint64_t{8} << 30;  // per device; out of memory beyond it
  DevicePreset preset;                        // cost_model.h; the default is h100_pcie5
  EffectSchedule schedule = EffectSchedule::kLate;
  ReuseMode reuse = ReuseMode::kImmediate;
  uint64_t seed = 1;  // drives every random choice
  bool detect_races = true;
  // A race is fatal by default: the process prints the report and aborts. Otherwise races are
  // collected (races()), for tests of the detector itself.
  bool abort_on_race = true;
  // For hardened tests: the CPU cannot touch pinned memory too early. Of the pages (4 KiB) that lie
  // entirely inside the host's end of a copy, those of a destination are unreadable and those of a
  // source read-only, from the submission until the host has observed the copy (synchronised, or
  // queried with the answer yes), whenever the bytes move. An access is a SIGSEGV that names the
  // copy. Not for programs whose kernels read or write pinned memory: they run on the host, too.
  bool protect_host_pages = false;
  // Keep the timeline for WriteChromeTrace: some hundred bytes per kernel and copy.
  bool record_trace = false;
  FaultPlan faults;  // faults.h

  absl::Status Validate() const;
};

struct ByteRange {
  const void* data = nullptr;
  uint64_t size_bytes = 0;
};

// An operator on a stream, as the LibTorch device submits it.
struct Kernel {
  std::string name;
  std::vector<ByteRange> reads;
  std::vector<ByteRange> writes;
  double flops = 0;
  double memory_bytes = 0;  // traffic to device memory; 0: the sum of reads and writes
  ComputeType type = ComputeType::kFloat32;
};

struct MemoryStats {
  uint64_t limit_bytes = 0;
  // What was asked for and not freed, plus what was freed while a recorded stream (RecordStream)
  // still had to get to that point.
  // This and the next two in multiples of kAllocationGranularityBytes (device/allocation_bytes.h).
  uint64_t in_use_bytes = 0;
  uint64_t peak_bytes = 0;
  uint64_t allocated_bytes = 0;  // from the start, whatever was freed since
  uint64_t allocations = 0;
  uint64_t frees = 0;
  uint64_t streams_recorded = 0;  // calls of RecordStream
};

struct MachineCore;

class EmulatedMachine : public std::enable_shared_from_this<EmulatedMachine> {
 public:
  static absl::StatusOr<std::shared_ptr<EmulatedMachine>> Create(const EmulatedOptions& options);
  ~EmulatedMachine();

  const EmulatedOptions& options() const;
  int device_count() const;
  // A shared_ptr that keeps the machine alive.
  std::shared_ptr<Device> device(int index);

  // Every device has a default stream that exists from the start.
  StreamHandle default_stream(int device);

  // --- Kernels ---
  // Forces the effects of all that work on `stream` is ordered after, so that the caller may now
  // run the operator on the host over the device's memory. Then, with the ranges known, Launch
  // submits it: race checks, time, trace. Nothing else may be submitted on `stream` in between by
  // the same thread except Allocate and Free. Injected faults of kernels (DeviceCall::kKernel) fail
  // PrepareKernel: the operator must not run then, and Launch not be called.
  absl::Status PrepareKernel(int device, StreamHandle stream);
  absl::Status Launch(int device, StreamHandle stream, const Kernel& kernel);

  // --- Copies outside the engine ---
  // As cudaMemcpyAsync: any mix of device and host pointers (pinned or pageable; the machine
  // knows). Pageable memory blocks the host. A copy inside a device runs on its compute engine, one
  // between devices on the source's D2H link.
  absl::Status Copy(int device, void* dst, const void* src, uint64_t size_bytes,
                    StreamHandle stream);

  // A use of `data`'s allocation by another stream, as tensor.record_stream(): Free waits for it.
  absl::Status RecordStream(const void* data, StreamHandle stream);

  // A host access to pinned memory, to be checked against copies. Tests and CPU operators use it.
  absl::Status HostAccess(const void* data, uint64_t size_bytes, bool write);

  // --- Memory that somebody else owns ---
  // Makes it pinned, and pageable again, as cudaHostRegister and cudaHostUnregister do. Whole pages
  // that are not pinned yet; unregistering waits for all devices. Counts as DeviceCall::kPin.
  // Unimplemented with protect_host_pages: that needs memory of the machine's own.
  absl::Status RegisterHost(int device, void* data, uint64_t size_bytes);
  absl::Status UnregisterHost(int device, void* data);

  // --- Observation ---
  // Blocks until all work of the device is done; forces all effects.
  absl::Status SynchronizeDevice(int device);
  // The host clock H. Counts the calling thread's arithmetic on the host for device 0.
  double now_ms() const;
  MemoryStats memory_stats(int device) const;
  void ResetPeakMemory(int device);
  TimeStats time_stats(int device) const;
  void ResetTimeStats(int device);
  // Who holds the device's memory, largest first: "aten::addmm 24 MiB (12 allocations)".
  // Names come from device/allocation_label.h.
  std::string MemoryReport(int device) const;
  absl::Status SetMemoryLimit(int device, uint64_t limit_bytes);
  // True if `data` lies in the memory of some device; *device is set to its index. Null: not asked.
  bool IsDevicePointer(const void* data, int* device) const;
  bool IsPinned(const void* data) const;
  // Reports of races seen so far (with abort_on_race off).
  std::vector<std::string> races() const;

  // --- Tests ---
  // Calls of a kind so far, failed ones included: the k to go up to in "fail the k-th call".
  uint64_t calls(DeviceCall call) const;

  // Makes IsCapturing(stream) answer `capturing`; polling an event that was recorded meanwhile
  // fails.
  absl::Status SetCapturing(StreamHandle stream, bool capturing);

  // Every later call of the device fails with `error`, as after a sticky fault: a fake runtime's
  // copy that faulted while it ran.
  void BreakDevice(int device, const std::string& error);

  // --- The timeline (EmulatedOptions::record_trace) ---
  // Takes the host's ranges into it, in virtual time: for EngineOptions::trace, and for a program's
  // own ScopedRanges. Keeps the machine alive. Null without record_trace.
  std::shared_ptr<TraceSink> trace();
  // Forgets what was before: pinning and other things that happen once would fill the picture.
  void RestartTrace();
  // Chrome trace (Perfetto opens it), virtual microseconds since the start, or RestartTrace: a row
  // per stream and per host thread, the device's memory, what compute stalled on, and an arrow from
  // each copy out to the copies in that read what it wrote.
  absl::Status WriteChromeTrace(const std::string& path) const;

 private:
  explicit EmulatedMachine(std::unique_ptr<MachineCore> core);

  const std::unique_ptr<MachineCore> core_;
  const std::unique_ptr<TraceSink> ranges_;
  std::vector<std::unique_ptr<Device>> devices_;
};

}  // namespace pinion

#endif  // PINION_DEVICE_EMULATED_EMULATED_MACHINE_H_
