// Builds a ChromeTrace from nested host ranges (a row per thread) and slices, relative to a start
// time.
//
//   TraceRecorder recorder("measured", /*host=*/0, "host", SteadyClockMs());
//   recorder.BeginRange("step", 0, SteadyClockMs());
//   recorder.Add(recorder.EndRange(SteadyClockMs()));
//
// The caller reads the clock, in milliseconds. The trace counts from the origin; earlier parts are
// cut off.
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
  // `times` as in ChromeTrace; `host` is the process of the host's rows.
  TraceRecorder(std::string times, int host, std::string host_name, double origin_ms);

  // Returns the trace, for names and samples. Add slices through Add.
  ChromeTrace& trace() { return trace_; }
  const ChromeTrace& trace() const { return trace_; }
  double origin_ms() const { return origin_ms_; }

  void Add(ChromeTrace::Slice slice);
  // Opens a range of the calling thread; ranges nest. `name` is a literal.
  void BeginRange(const char* name, uint64_t size_bytes, double now_ms);
  // Closes the calling thread's innermost range and returns its slice, for Add.
  ChromeTrace::Slice EndRange(double now_ms);

  // Removes slices and samples; `now_ms` becomes the origin.
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
