// Emulates a host with accelerators: Pinion programs and tests run without a GPU, in repeatable
// virtual time.
//
//   EmulatedOptions options;
//   options.device_count = 2;
//   options.preset = *FindPreset("h100_pcie5");
//   PINION_ASSIGN_OR_RETURN(auto machine, EmulatedMachine::Create(options));
//   Device& device = *machine->device(0);
//
// Submitted work is simulated in three separate respects:
//   values  Real bytes move. A copy is deferred and reads its source when it takes effect; the
//           schedule decides when, among all legal moments. A kernel runs at once on the host,
//           after the effects of everything that it is ordered after.
//   races   Vector clocks over byte ranges. Two accesses, one of them a write, that no event or
//           stream orders are an error, in whatever order the bytes moved. The report names both
//           accesses, their streams and the missing edge.
//   time    Virtual. The host clock H rises by each call's cost and by blocking waits; kernels and
//           copies take as long as the preset's cost model says; copies share links.
//
// There are no threads here: all of it happens inside the calls. All host threads share one host
// clock (docs/maintainers/decisions/0001), so races among host threads are left to ThreadSanitizer.
//
// Errors: InvalidArgument for a device index that does not exist. Calls without a status end the
// process.
// Thread safety: thread-safe (one mutex). Times are exact and repeatable if one host thread is
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
  kEarly,   // once its dependencies have taken effect
  kLate,    // only when a dependent operation or an observation forces it
  kRandom,  // the seed decides at each call
};

// Which memory Allocate reuses after a Free.
enum class ReuseMode {
  kImmediate,   // last in, first out, like a caching allocator
  kQuarantine,  // reuses an address as late as capacity allows
};

struct EmulatedOptions {
  int device_count = 1;
  uint64_t memory_bytes = uint64_t{8} << 30;  // capacity per device
  DevicePreset preset;                        // cost_model.h; the default is h100_pcie5
  EffectSchedule schedule = EffectSchedule::kLate;
  ReuseMode reuse = ReuseMode::kImmediate;
  uint64_t seed = 1;  // drives every random choice
  bool detect_races = true;
  // True: a race prints its report and aborts the process. False: races() collects reports, for
  // tests of the detector itself.
  bool abort_on_race = true;
  // For hardened tests: the CPU cannot touch pinned memory while a copy uses it. Concerns the 4 KiB
  // pages that lie entirely inside a copy's host end. Pages of a destination become inaccessible,
  // pages of a source read-only. This lasts from submission until the host has observed the copy,
  // by synchronising or by a successful query. An access is a SIGSEGV that names the copy. Kernels
  // also run on the CPU, so they must not touch pinned memory.
  bool protect_host_pages = false;
  // Records the timeline for WriteChromeTrace: some hundred bytes per kernel and copy.
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
  double memory_bytes = 0;  // device memory traffic; 0: the sum of reads and writes
  ComputeType type = ComputeType::kFloat32;
};

struct MemoryStats {
  uint64_t limit_bytes = 0;
  // Live bytes, plus freed bytes that a recorded stream (RecordStream) may still use. This field
  // and the next two are in multiples of kAllocationGranularityBytes (device/allocation_bytes.h).
  uint64_t in_use_bytes = 0;
  uint64_t peak_bytes = 0;
  uint64_t allocated_bytes = 0;  // total since the start, including freed memory
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
  // Returns a device; the shared_ptr keeps the machine alive.
  std::shared_ptr<Device> device(int index);

  // Returns the default stream, which every device has from the start.
  StreamHandle default_stream(int device);

  // --- Kernels ---
  // Forces the effects of all work that `stream` is ordered after. The caller may then run the
  // operator on the host over device memory. After that it calls Launch, which checks races and
  // charges time. In between, this thread may submit only Allocate and Free on `stream`. After an
  // error, for example an injected DeviceCall::kKernel fault, run neither the operator nor Launch.
  absl::Status PrepareKernel(int device, StreamHandle stream);
  absl::Status Launch(int device, StreamHandle stream, const Kernel& kernel);

  // --- Copies outside the engine ---
  // Copies like cudaMemcpyAsync, between any device and host pointers, pinned or pageable. Pageable
  // memory blocks the host. A copy inside a device uses its compute engine, a copy between devices
  // the source's D2H link.
  absl::Status Copy(int device, void* dst, const void* src, uint64_t size_bytes,
                    StreamHandle stream);

  // Makes Free wait for `stream`, another user of `data`'s allocation, like tensor.record_stream().
  absl::Status RecordStream(const void* data, StreamHandle stream);

  // Checks a host access to pinned memory against copies. For tests and CPU operators.
  absl::Status HostAccess(const void* data, uint64_t size_bytes, bool write);

  // --- Observation ---
  // Blocks until all work of the device is done; forces all effects.
  absl::Status SynchronizeDevice(int device);
  // The host clock H. Counts the calling thread's arithmetic on the host for device 0.
  double now_ms() const;
  MemoryStats memory_stats(int device) const;
  void ResetPeakMemory(int device);
  TimeStats time_stats(int device) const;
  void ResetTimeStats(int device);
  // Lists the labels (device/allocation_label.h) that hold the device's memory, largest first:
  // "aten::addmm 24 MiB (12 allocations)".
  std::string MemoryReport(int device) const;
  absl::Status SetMemoryLimit(int device, uint64_t limit_bytes);
  // Returns true if `data` lies in a device's memory, and sets *device (if not null) to its index.
  bool IsDevicePointer(const void* data, int* device) const;
  bool IsPinned(const void* data) const;
  // Returns the reports of races found so far (with abort_on_race off).
  std::vector<std::string> races() const;

  // --- Tests ---
  // Returns the number of calls of a kind so far, including failed ones.
  uint64_t calls(DeviceCall call) const;

  // Makes IsCapturing(stream) return `capturing`. Events recorded meanwhile cannot be polled.
  absl::Status SetCapturing(StreamHandle stream, bool capturing);

  // Makes every later call of the device fail with `error`, as after a sticky fault.
  void BreakDevice(int device, const std::string& error);

  // --- The timeline (EmulatedOptions::record_trace) ---
  // Returns a sink that records host ranges in virtual time, for EngineOptions::trace and for a
  // program's own ScopedRanges. The sink keeps the machine alive. Null without record_trace.
  std::shared_ptr<TraceSink> trace();
  // Discards the timeline so far, for example one-time pinning.
  void RestartTrace();
  // Writes a Chrome trace for Perfetto, in virtual microseconds since the start or RestartTrace. It
  // has a row per stream and host thread, device memory, and stalls of compute. An arrow leads from
  // each copy out to the copies in that read its bytes.
  absl::Status WriteChromeTrace(const std::string& path) const;

 private:
  explicit EmulatedMachine(std::unique_ptr<MachineCore> core);

  const std::unique_ptr<MachineCore> core_;
  const std::unique_ptr<TraceSink> ranges_;
  std::vector<std::unique_ptr<Device>> devices_;
};

}  // namespace pinion

#endif  // PINION_DEVICE_EMULATED_EMULATED_MACHINE_H_
