#include "pinion/bench/allocator/allocation_trace.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <unordered_map>
#include <utility>

#include "absl/strings/str_cat.h"

namespace pinion {

absl::StatusOr<AllocationTrace> ParseAllocationTrace(std::string name, std::string_view text) {
  AllocationTrace trace;
  trace.name = std::move(name);
  std::unordered_map<uint32_t, uint64_t> live;
  uint64_t live_bytes = 0;
  std::istringstream lines{std::string(text)};
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    const auto wrong = [&](const char* what) {
      return absl::InvalidArgumentError(
          absl::StrCat(trace.name, ", line ", number, ": ", what, ": \"", line, "\""));
    };
    if (line.empty() || line[0] == '#' || line == "s") continue;
    std::istringstream words(line);
    char kind = 0;
    AllocationEvent event;
    words >> kind;
    if (!(words >> event.block)) return wrong("a block's number is missing");
    if (kind == 'a') {
      event.kind = AllocationEvent::Kind::kAllocate;
      if (!(words >> event.size_bytes) || event.size_bytes == 0) return wrong("no size");
      if (!live.emplace(event.block, event.size_bytes).second) return wrong("allocated twice");
      ++trace.allocations;
      live_bytes += event.size_bytes;
      trace.peak_bytes = std::max(trace.peak_bytes, live_bytes);
      trace.blocks = std::max(trace.blocks, event.block + 1);
    } else if (kind == 'f') {
      event.kind = AllocationEvent::Kind::kFree;
      const auto node = live.extract(event.block);
      if (node.empty()) return wrong("freed, but not allocated");
      live_bytes -= node.mapped();
    } else {
      return wrong("neither s, a nor f");
    }
    trace.events.push_back(event);
  }
  if (!live.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(trace.name, ": block ", live.begin()->first,
                                                   " is never freed, nor are ", live.size() - 1,
                                                   " others; a trace ends with nothing allocated"));
  }
  return trace;
}

absl::StatusOr<AllocationTrace> ReadAllocationTrace(const std::string& path) {
  std::ifstream file(path);
  if (!file) return absl::NotFoundError(absl::StrCat("cannot read the trace ", path));
  std::ostringstream text;
  text << file.rdbuf();
  return ParseAllocationTrace(std::filesystem::path(path).stem().string(), text.str());
}

}  // namespace pinion
