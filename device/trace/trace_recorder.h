// A trace while it is recorded: what lies before its origin is cut off, and the ranges of host
// threads are rows of one process, a row for each thread.
//
// Times are milliseconds of a clock that the caller reads; in the trace they count from the origin.
//
// Thread safety: none; a value.

#ifndef PINION_DEVICE_TRACE_TRACE_RECORDER_H_
#define PINION_DEVICE_TRACE_TRACE_RECORDER_H_

#include <cstdint>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "pinion/device/trace/chrome_trace.h"

namespace pinion {

class TraceRecorder {
 public:
  // `times` as ChromeTrace has it; the host is process `host`.
  TraceRecorder(std::string times, int host, std::string host_name, double origin_ms);

  // For names and samples. Slices go through Add.
  ChromeTrace& trace() { return trace_; }
  const ChromeTrace& trace() const { return trace_; }
  double origin_ms() const { return origin_ms_; }

  void Add(ChromeTrace::Slice slice);
  // Of the calling thread, whose ranges nest. `name` is a literal.
  void BeginRange(const char* name, uint64_t size_bytes, double now_ms);
  // The slice of the range that was begun last, for Add.
  ChromeTrace::Slice EndRange(double now_ms);

  // Forgets slices and samples; `now_ms` becomes the origin.
  void Restart(double now_ms);

 private:
  struct OpenRange {
    const char* name;
    uint64_t size_bytes;
    double start_ms;
  };
  struct Thread {
    int row;
    std::vector<OpenRange> open;
  };

  Thread& CallingThread();

  ChromeTrace trace_;
  int host_;
  double origin_ms_;
  std::map<std::thread::id, Thread> threads_;
};

}  // namespace pinion

#endif  // PINION_DEVICE_TRACE_TRACE_RECORDER_H_
