// Writes a timeline as a Chrome trace file, for Perfetto (ui.perfetto.dev) or chrome://tracing.
//
//   ChromeTrace trace("measured", /*host=*/0, "host", SteadyClockMs());
//   trace.BeginRange("step", 0, SteadyClockMs());
//   trace.Add(trace.EndRange(SteadyClockMs()));
//   PINION_RETURN_IF_ERROR(trace.Write("steps.json"));
//
// A process has rows, and a row has slices. Arrows connect slices; samples plot a number over time.
// In Pinion's traces a process is a device or the host, and a row is a stream or a thread. Each
// thread's ranges are in a row of the host.
//
// The caller reads the clock, in milliseconds. The file counts from the origin; earlier parts of
// slices are cut off.
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

  // `times` tells the reader how the times arose: "measured", "modelled". `host` is the process of
  // the host's rows.
  ChromeTrace(std::string times, int host, std::string host_name, double origin_ms);

  void NameProcess(int process, std::string name);
  void NameRow(int process, int row, std::string name);
  void Add(Slice slice);
  void AddSample(Sample sample);
  size_t slice_count() const { return slices_.size(); }

  // Opens a range of the calling thread; ranges nest. `name` is a literal.
  void BeginRange(const char* name, uint64_t size_bytes, double now_ms);
  // Closes the calling thread's innermost range and returns its slice, for Add.
  Slice EndRange(double now_ms);

  // Removes slices and samples; `now_ms` becomes the origin.
  void Restart(double now_ms);

  // Returns Unavailable, with the path and the reason, if the file cannot be written.
  absl::Status Write(const std::string& path) const;

 private:
  struct Name {
    int process;
    int row;  // -1: the process itself
    std::string text;
  };

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
  std::string ToJson() const;

  std::string times_;
  int host_;
  double origin_ms_;
  std::vector<Name> names_;
  std::vector<Slice> slices_;
  std::vector<Sample> samples_;
  std::map<std::thread::id, Thread> threads_;
};

}  // namespace pinion

#endif  // PINION_DEVICE_TRACE_CHROME_TRACE_H_
