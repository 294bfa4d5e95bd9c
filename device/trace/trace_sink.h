// Where Pinion says what it does and how long it took: ranges of host code, transfers, stalls.
//
//   EngineOptions options;
//   options.trace = std::make_shared<NvtxTraceSink>();   // device/cuda: Nsight Systems
//   ...
//   const ScopedRange range(options.trace.get(), "pinion.submit", size_bytes);
//
// Sinks: device/trace/chrome_trace_sink (a file for Perfetto), device/cuda/nvtx_trace_sink,
// hooks/profiler_trace_sink (LibTorch's profiler).
//
// Times are milliseconds of the host's steady clock (std::chrono::steady_clock, from its epoch).
// Those of a device are its own clock, set to the host's when its engine was created; where they
// are modelled they run in virtual time from there.
//
// Thread safety: sinks are thread-safe; ranges of one thread nest. Calls are made with no lock
// held. A sink must not call back into what it observes, and must not throw.

#ifndef PINION_DEVICE_TRACE_TRACE_SINK_H_
#define PINION_DEVICE_TRACE_TRACE_SINK_H_

#include <chrono>
#include <cstdint>
#include <string>

#include "pinion/allocator/base/check.h"
#include "pinion/device/device.h"

namespace pinion {

// The clock of the times below.
inline double SteadyClockMs() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(now).count();
}

// A transfer that is done, or a chunk of a large one.
struct TransferRecord {
  std::string device;  // "cuda:0"
  CopyDirection direction = CopyDirection::kHostToDevice;
  uint64_t number = 0;  // on its direction's timeline
  uint64_t size_bytes = 0;
  uint64_t pieces = 0;
  double submitted_ms = 0;  // the host's clock
  double start_ms = 0;      // the device's clock, as all below
  double end_ms = 0;
};

// A stream that reached a wait for a transfer, and the moment at which the wait let it go on. The
// two are the same, but for the cost of the events, when the transfer was done in time.
struct StallRecord {
  std::string device;
  StreamHandle stream;
  const char* wait_site = "";                              // what it waited for, by name; a literal
  CopyDirection direction = CopyDirection::kHostToDevice;  // of the transfer
  uint64_t transfer_number = 0;
  double start_ms = 0;
  double end_ms = 0;
};

class TraceSink {
 public:
  virtual ~TraceSink() = default;

  // The calling thread enters a range, and leaves the one that it entered last. `name` is a
  // literal; size_bytes is 0 where there is nothing to count.
  virtual void BeginRange(const char* name, uint64_t size_bytes) = 0;
  virtual void EndRange() = 0;

  // False, as of sinks of ranges alone, spares engines the two timed events around each transfer
  // and each wait: then they report neither.
  virtual bool WantsTransfers() const = 0;
  virtual void OnTransfer(const TransferRecord& /*transfer*/) {}
  virtual void OnStall(const StallRecord& /*stall*/) {}
};

// A range as long as the object lives. Without a sink it costs one test of a pointer.
class [[nodiscard]] ScopedRange {
 public:
  [[nodiscard]] ScopedRange(TraceSink* sink, const char* name, uint64_t size_bytes = 0)
      : sink_(sink) {
    if (sink_ == nullptr) return;
    PINION_CHECK(name != nullptr) << "a range has a name";
    sink_->BeginRange(name, size_bytes);
  }
  ~ScopedRange() {
    if (sink_ != nullptr) sink_->EndRange();
  }
  ScopedRange(const ScopedRange&) = delete;
  ScopedRange& operator=(const ScopedRange&) = delete;

 private:
  TraceSink* const sink_;
};

}  // namespace pinion

#endif  // PINION_DEVICE_TRACE_TRACE_SINK_H_
