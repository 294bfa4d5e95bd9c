// Records ranges, transfers and stalls for a trace file that Perfetto opens.
//
//   auto trace = std::make_shared<ChromeTraceSink>();
//   options.engine.trace = trace;
//   ... a few steps ...
//   PINION_RETURN_IF_ERROR(trace->Write("steps.json"));
//
//   host     | thread 1  [ pinion.pack ]    [pinion.unpack        ]
//            | thread 2                     [ pinion.prefetch ]
//   cuda:0   | D2H                   [ copy D2H ][copy D2H]
//            | H2D                                    [ copy H2D    ]
//            | stalls of stream 1                        [ kUnpackAfterCopyIn ]
//
// Each range, transfer and stall takes some 200 bytes of memory: trace a few steps, not a whole
// training run. The sink drops slices beyond `max_slices`, and the file reports their number.
//
// Thread safety: thread-safe.

#ifndef PINION_DEVICE_TRACE_CHROME_TRACE_SINK_H_
#define PINION_DEVICE_TRACE_CHROME_TRACE_SINK_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/device/trace/chrome_trace.h"
#include "pinion/device/trace/trace_sink.h"

namespace pinion {

class ChromeTraceSink final : public TraceSink {
 public:
  explicit ChromeTraceSink(size_t max_slices = size_t{1} << 20);

  void BeginRange(const char* name, uint64_t size_bytes) override;
  void EndRange() override;
  bool WantsTransfers() const override { return true; }
  void OnTransfer(const TransferRecord& transfer) override;
  void OnStall(const StallRecord& stall) override;

  // Forgets recorded slices, such as a first step's pinning and calibration; time restarts at 0.
  void Restart();

  // Writes the recorded slices; time 0 is the sink's construction or the last Restart. Unavailable,
  // with the path and the reason, if the file cannot be written.
  absl::Status Write(const std::string& path) const;

 private:
  struct DeviceRows {
    int process = 0;
    std::map<void*, int> streams;  // row of a stream's stalls, by native handle
  };

  DeviceRows& RowsOf(const std::string& device) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Keep(ChromeTrace::Slice slice) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const size_t max_slices_;
  mutable Mutex mu_;
  ChromeTrace trace_ ABSL_GUARDED_BY(mu_);
  uint64_t dropped_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<std::string, DeviceRows> devices_ ABSL_GUARDED_BY(mu_);
};

}  // namespace pinion

#endif  // PINION_DEVICE_TRACE_CHROME_TRACE_SINK_H_
