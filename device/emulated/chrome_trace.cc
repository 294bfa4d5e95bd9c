#include "pinion/device/emulated/chrome_trace.h"

#include <cerrno>
#include <cstring>
#include <fstream>

#include "nlohmann/json.hpp"

namespace pinion {

void ChromeTrace::NameDevice(int device, std::string name) {
  rows_.push_back({device, -1, std::move(name)});
}

void ChromeTrace::NameStream(int device, int stream, std::string name) {
  rows_.push_back({device, stream, std::move(name)});
}

std::string ChromeTrace::ToJson() const {
  nlohmann::json events = nlohmann::json::array();
  for (const Row& row : rows_) {
    nlohmann::json event = {{"ph", "M"}, {"pid", row.device}, {"args", {{"name", row.name}}}};
    event["name"] = row.stream < 0 ? "process_name" : "thread_name";
    if (row.stream >= 0) event["tid"] = row.stream;
    events.push_back(std::move(event));
  }
  for (const Slice& slice : slices_) {
    nlohmann::json event = {{"ph", "X"},
                            {"name", slice.name},
                            {"pid", slice.device},
                            {"tid", slice.stream},
                            {"ts", slice.start_ms * 1e3},
                            {"dur", (slice.end_ms - slice.start_ms) * 1e3}};
    if (slice.size_bytes > 0) event["args"] = {{"bytes", slice.size_bytes}};
    events.push_back(std::move(event));
  }
  const nlohmann::json trace = {
      {"displayTimeUnit", "ms"},
      {"otherData", {{"times", "modelled by the emulated accelerator, not measured"}}},
      {"traceEvents", std::move(events)}};
  // Names may hold any bytes; JSON must be UTF-8.
  return trace.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

absl::Status ChromeTrace::Write(const std::string& path) const {
  std::ofstream file(path);
  file << ToJson() << '\n';
  file.close();
  if (file.good()) return absl::OkStatus();
  return absl::UnavailableError("cannot write the trace to " + path + ": " + std::strerror(errno));
}

}  // namespace pinion
