// A timeline as a Chrome trace: Perfetto and chrome://tracing open it.
//
// One process per device, one row per stream, times in virtual microseconds.
//
// Thread safety: none; a value.

#ifndef PINION_DEVICE_EMULATED_CHROME_TRACE_H_
#define PINION_DEVICE_EMULATED_CHROME_TRACE_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"

namespace pinion {

class ChromeTrace {
 public:
  struct Slice {
    int device = 0;
    int stream = 0;
    std::string name;
    double start_ms = 0;
    double end_ms = 0;
    uint64_t size_bytes = 0;  // 0: not a copy
  };

  void NameDevice(int device, std::string name);
  void NameStream(int device, int stream, std::string name);
  void Add(Slice slice) { slices_.push_back(std::move(slice)); }

  // Unavailable, with the path and the reason, if the file cannot be written.
  absl::Status Write(const std::string& path) const;

 private:
  struct Row {
    int device;
    int stream;  // -1: the device itself
    std::string name;
  };

  std::string ToJson() const;

  std::vector<Row> rows_;
  std::vector<Slice> slices_;
};

}  // namespace pinion

#endif  // PINION_DEVICE_EMULATED_CHROME_TRACE_H_
