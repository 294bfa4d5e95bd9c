// Receives Pinion's timings: ranges of host code, transfers and stalls. Implement it to export
// them.
//
//   EngineOptions options;
//   options.trace = std::make_shared<NvtxTraceSink>();   // device/cuda: Nsight Systems
//   ...
//   const ScopedRange range(options.trace.get(), "pinion.submit", size_bytes);
//
// Sinks: device/trace/chrome_trace_sink (a file for Perfetto), device/cuda/nvtx_trace_sink,
// hooks/profiler_trace_sink (LibTorch's profiler).
//
// Times are milliseconds of std::chrono::steady_clock, counted from its epoch. Device times come
// from the device's own clock, which is set to the host's when its engine is created. On the
// emulated device they run in virtual time from there.
//
// Thread safety: sinks are thread-safe; ranges of one thread nest. Pinion calls a sink with no lock
// held. A sink must not call back into the object that calls it, and must not throw.

#ifndef PINION_DEVICE_TRACE_TRACE_SINK_H_
#define PINION_DEVICE_TRACE_TRACE_SINK_H_

#include <chrono>
#include <cstdint>
#include <string>
#include <thread>

#include "pinion/allocator/base/check.h"
#include "pinion/device/device.h"

namespace pinion {

// Returns the time of the clock that all records below use.
inline double SteadyClockMs() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(now).count();
}

// A finished transfer, or a finished chunk of a large one.
struct TransferRecord {
  std::string device;  // "cuda:0"
  CopyDirection direction = CopyDirection::kHostToDevice;
  uint64_t number = 0;  // submission number on its direction's timeline
  uint64_t size_bytes = 0;
  uint64_t pieces = 0;
  double submitted_ms = 0;  // host clock
  double start_ms = 0;      // device clock, like end_ms
  double end_ms = 0;
};

// A stream's wait for a transfer, from the moment the stream reached the wait until it continued.
// If the transfer was done in time, both moments are equal up to the cost of the events.
struct StallRecord {
  std::string device;
  StreamHandle stream;
  const char* wait_site = "";                              // name of the WaitSite; a literal
  CopyDirection direction = CopyDirection::kHostToDevice;  // of the transfer
  uint64_t transfer_number = 0;
  double start_ms = 0;
  double end_ms = 0;
};

class TraceSink {
 public:
  virtual ~TraceSink() = default;

  // Open and close the calling thread's innermost range. `name` is a literal; size_bytes may be 0.
  virtual void BeginRange(const char* name, uint64_t size_bytes) = 0;
  virtual void EndRange() = 0;

  // Returns true if OnTransfer and OnStall are wanted. False saves engines two timed events around
  // each transfer and each wait.
  virtual bool WantsTransfers() const = 0;
  virtual void OnTransfer(const TransferRecord& /*transfer*/) {}
  virtual void OnStall(const StallRecord& /*stall*/) {}
};

// Records a range that lasts as long as the object. Costs one pointer test if the sink is null. An
// object that ends on another thread leaves its range open, because ranges nest per thread.
class [[nodiscard]] ScopedRange {
 public:
  [[nodiscard]] ScopedRange(TraceSink* sink, const char* name, uint64_t size_bytes = 0)
      : sink_(sink) {
    if (sink_ == nullptr) return;
    PINION_CHECK(name != nullptr) << "a range has a name";
    thread_ = std::this_thread::get_id();
    sink_->BeginRange(name, size_bytes);
  }
  ~ScopedRange() {
    if (sink_ != nullptr && thread_ == std::this_thread::get_id()) sink_->EndRange();
  }
  ScopedRange(const ScopedRange&) = delete;
  ScopedRange& operator=(const ScopedRange&) = delete;

 private:
  TraceSink* const sink_;
  std::thread::id thread_;  // set if there is a sink
};

}  // namespace pinion

#endif  // PINION_DEVICE_TRACE_TRACE_SINK_H_
