#include "pinion/device/trace/chrome_trace.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>

#include "nlohmann/json.hpp"
#include "pinion/allocator/base/check.h"

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

ChromeTrace::ChromeTrace(std::string times, int host, std::string host_name, double origin_ms)
    : times_(std::move(times)), host_(host), origin_ms_(origin_ms) {
  NameProcess(host_, std::move(host_name));
}

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

ChromeTrace::Thread& ChromeTrace::CallingThread() {
  const int row = static_cast<int>(threads_.size()) + 1;
  const auto [found, added] = threads_.try_emplace(std::this_thread::get_id(), Thread{row, {}});
  if (added) NameRow(host_, row, "thread " + std::to_string(row));
  return found->second;
}

void ChromeTrace::Add(ChromeTrace::Slice slice) {
  if (slice.end_ms <= origin_ms_) return;
  slice.start_ms = std::max(slice.start_ms, origin_ms_) - origin_ms_;
  slice.end_ms -= origin_ms_;
  slices_.push_back(std::move(slice));
}

void ChromeTrace::AddSample(Sample sample) {
  sample.time_ms -= origin_ms_;
  samples_.push_back(std::move(sample));
}

void ChromeTrace::BeginRange(const char* name, uint64_t size_bytes, double now_ms) {
  PINION_CHECK(name != nullptr) << "a range has a name";
  CallingThread().open.push_back({name, size_bytes, now_ms});
}

ChromeTrace::Slice ChromeTrace::EndRange(double now_ms) {
  Thread& thread = CallingThread();
  PINION_CHECK(!thread.open.empty()) << "EndRange without BeginRange on this thread";
  const OpenRange range = thread.open.back();
  thread.open.pop_back();
  return {.process = host_,
          .row = thread.row,
          .name = range.name,
          .start_ms = range.start_ms,
          .end_ms = now_ms,
          .size_bytes = range.size_bytes};
}

void ChromeTrace::Restart(double now_ms) {
  slices_.clear();
  samples_.clear();
  origin_ms_ = now_ms;
}

}  // namespace pinion
