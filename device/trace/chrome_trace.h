// Writes a timeline as a Chrome trace file, for Perfetto (ui.perfetto.dev) or chrome://tracing.
//
//   ChromeTrace trace("measured");
//   trace.NameProcess(0, "host");
//   trace.Add(ChromeTrace::Slice{.name = "step", .start_ms = 0, .end_ms = 12});
//   PINION_RETURN_IF_ERROR(trace.Write("steps.json"));
//
// A process has rows, and a row has slices. Arrows connect slices; samples plot a number over time.
// In Pinion's traces a process is a device or the host, and a row is a stream or a thread.
//
// Thread safety: none; values.

#ifndef PINION_DEVICE_TRACE_CHROME_TRACE_H_
#define PINION_DEVICE_TRACE_CHROME_TRACE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"

namespace pinion {

class ChromeTrace {
 public:
  struct Slice {
    int process = 0;
    int row = 0;
    std::string name;
    double start_ms = 0;
    double end_ms = 0;
    uint64_t size_bytes = 0;         // 0: unknown
    uint64_t transfer_number = 0;    // 0: none
    std::string operator_name = "";  // "": unknown
    // The slice with arrow_from == N has an arrow to every slice whose arrows_to contains N.
    uint64_t arrow_from = 0;  // 0: none
    std::set<uint64_t> arrows_to = {};
  };
  // A graph's value from `time_ms` on. Process and name identify the graph.
  struct Sample {
    int process = 0;
    std::string name;
    double time_ms = 0;
    uint64_t value_bytes = 0;
  };

  // `times` tells the reader how the times arose: "measured", "modelled".
  explicit ChromeTrace(std::string times) : times_(std::move(times)) {}

  void NameProcess(int process, std::string name);
  void NameRow(int process, int row, std::string name);
  void Add(Slice slice) { slices_.push_back(std::move(slice)); }
  void Add(Sample sample) { samples_.push_back(std::move(sample)); }
  // Removes slices and samples; keeps the names.
  void Clear();
  size_t slice_count() const { return slices_.size(); }

  // Returns Unavailable, with the path and the reason, if the file cannot be written.
  absl::Status Write(const std::string& path) const;

 private:
  struct Name {
    int process;
    int row;  // -1: the process itself
    std::string text;
  };

  std::string ToJson() const;

  std::string times_;
  std::vector<Name> names_;
  std::vector<Slice> slices_;
  std::vector<Sample> samples_;
};

// Builds a ChromeTrace from nested host ranges (a row per thread) and slices, relative to a start
// time.
//
//   TraceRecorder recorder("measured", /*host=*/0, "host", SteadyClockMs());
//   recorder.BeginRange("step", 0, SteadyClockMs());
//   recorder.Add(recorder.EndRange(SteadyClockMs()));
//
// The caller reads the clock, in milliseconds. The trace counts from the origin; earlier parts are
// cut off.
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

#endif  // PINION_DEVICE_TRACE_CHROME_TRACE_H_
