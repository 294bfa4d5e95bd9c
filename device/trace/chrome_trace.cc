#include "pinion/device/trace/chrome_trace.h"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <map>
#include <vector>

#include "nlohmann/json.hpp"

namespace pinion {
namespace {

// Each arrow is a flow of its own: Perfetto would join the steps of one flow one after the other.
void AddArrows(const std::vector<ChromeTrace::Slice>& slices, nlohmann::json& events) {
  std::map<uint64_t, const ChromeTrace::Slice*> origins;
  for (const ChromeTrace::Slice& slice : slices) {
    origins[slice.arrow_from] = &slice;
  }
  uint64_t arrows = 0;
  const auto end = [&events, &arrows](const char* phase, const ChromeTrace::Slice& at) {
    events.push_back({{"ph", phase},
                      {"id", arrows},
                      {"cat", "copies"},
                      {"name", "comes back"},
                      {"pid", at.process},
                      {"tid", at.row},
                      // Inside the slice: rounding in the reader cannot detach it.
                      {"ts", (at.start_ms + at.end_ms) / 2 * 1e3}});
  };
  for (const ChromeTrace::Slice& slice : slices) {
    for (const uint64_t number : slice.arrows_to) {
      const auto origin = origins.find(number);
      if (origin == origins.end()) continue;
      ++arrows;
      end("s", *origin->second);
      end("f", slice);
      events.back()["bp"] = "e";  // binds to the slice around it
    }
  }
}

}  // namespace

void ChromeTrace::NameProcess(int process, std::string name) {
  names_.push_back({process, -1, std::move(name)});
}

void ChromeTrace::NameRow(int process, int row, std::string name) {
  names_.push_back({process, row, std::move(name)});
}

void ChromeTrace::Clear() {
  slices_.clear();
  samples_.clear();
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
    if (!slice.operator_name.empty()) event["args"]["operator"] = slice.operator_name;
    events.push_back(std::move(event));
  }
  AddArrows(slices_, events);
  for (const Sample& sample : samples_) {
    events.push_back({{"ph", "C"},
                      {"name", sample.name},
                      {"pid", sample.process},
                      {"ts", sample.time_ms * 1e3},
                      {"args", {{"bytes", sample.value_bytes}}}});
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
  return absl::UnavailableError("cannot write the trace to \"" + path +
                                "\": " + std::strerror(errno));
}

}  // namespace pinion
