#include "pinion/device/chrome_trace.h"

#include <cerrno>
#include <cstring>
#include <fstream>

#include "nlohmann/json.hpp"

namespace pinion {

void ChromeTrace::NameProcess(int process, std::string name) {
  names_.push_back({process, -1, std::move(name)});
}

void ChromeTrace::NameRow(int process, int row, std::string name) {
  names_.push_back({process, row, std::move(name)});
}

std::string ChromeTrace::ToJson() const {
  nlohmann::json events = nlohmann::json::array();
  for (const Name& name : names_) {
    nlohmann::json event = {{"ph", "M"}, {"pid", name.process}, {"args", {{"name", name.text}}}};
    event["name"] = name.row < 0 ? "process_name" : "thread_name";
    if (name.row >= 0) event["tid"] = name.row;
    events.push_back(std::move(event));
  }
  for (const Slice& slice : slices_) {
    nlohmann::json event = {{"ph", "X"},
                            {"name", slice.name},
                            {"pid", slice.process},
                            {"tid", slice.row},
                            {"ts", slice.start_ms * 1e3},
                            {"dur", (slice.end_ms - slice.start_ms) * 1e3}};
    if (slice.size_bytes > 0) event["args"]["bytes"] = slice.size_bytes;
    if (slice.transfer_number > 0) event["args"]["transfer"] = slice.transfer_number;
    events.push_back(std::move(event));
  }
  const nlohmann::json trace = {{"displayTimeUnit", "ms"},
                                {"otherData", {{"times", times_}}},
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
