#include "pinion/allocator/ram/ram_probe.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <optional>
#include <span>
#include <sstream>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace pinion {
namespace {

// No table of Abseil's: those do not survive an allocation that throws.
using Fields = std::map<std::string, uint64_t>;

// What the two versions call the same things.
struct CgroupFiles {
  const char* current;
  std::span<const char* const> limits;
  const char* stat_prefix;  // of the fields that include descendants
};
constexpr const char* kV2Limits[] = {"memory.max", "memory.high"};
constexpr const char* kV1Limits[] = {"memory.limit_in_bytes"};
constexpr CgroupFiles kV2 = {"memory.current", kV2Limits, ""};
constexpr CgroupFiles kV1 = {"memory.usage_in_bytes", kV1Limits, "total_"};

uint64_t SaturatingSubtract(uint64_t a, uint64_t b) { return a - std::min(a, b); }

// Empty for a file that is not there. Streams of files would be empty, too, where the heap has no
// memory for their buffers, and a host of which nothing is known has no limits.
std::string ReadFile(const std::string& path) {
  std::string text;
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return text;
  const absl::Cleanup close_file = [file] { close(file); };
  char part[4096];
  for (ssize_t size = 0; (size = read(file, part, sizeof(part))) > 0;) text.append(part, size);
  return text;
}

// "MemTotal:  16 kB" and "active_file 4096", a line each.
Fields ReadFields(const std::string& path) {
  Fields fields;
  std::istringstream lines(ReadFile(path));
  lines.exceptions(std::ios::badbit);  // which want of memory is otherwise
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string name;
    std::string unit;
    uint64_t value = 0;
    words >> name >> value >> unit;
    fields[std::string(absl::StripSuffix(name, ":"))] = unit == "kB" ? value * 1024 : value;
  }
  return fields;
}

uint64_t Field(const Fields& fields, const std::string& name) {
  const auto found = fields.find(name);
  return found == fields.end() ? 0 : found->second;
}

// Nothing when the file is missing, or for "max": no limit. (v1 writes the largest page-aligned
// int64 for that, which is more than any host has.)
std::optional<uint64_t> ReadNumber(const std::string& path) {
  uint64_t value = 0;
  if (!absl::SimpleAtoi(ReadFile(path), &value)) return std::nullopt;
  return value;
}

double PsutilPercent(uint64_t total, uint64_t available) {
  const double percent =
      static_cast<double>(total - available) / static_cast<double>(total) * 100.0;
  // Python rounds the exact binary value to the nearest decimal, as printf does.
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f", percent);
  return std::strtod(text, nullptr);
}

void ReadHost(const std::string& proc_root, RamSample* sample) {
  const Fields fields = ReadFields(absl::StrCat(proc_root, "/meminfo"));
  const uint64_t total = Field(fields, "MemTotal");
  if (total == 0) return;
  // psutil's rules for kernels and containers that report no or an impossible MemAvailable.
  uint64_t available = Field(fields, "MemAvailable");
  const uint64_t free = Field(fields, "MemFree");
  if (available == 0) available = free + Field(fields, "Cached");
  if (available > total) available = free;
  sample->total_bytes = total;
  sample->available_bytes = std::min(available, total);
  sample->percent = PsutilPercent(total, sample->available_bytes);
  sample->headroom_bytes = sample->available_bytes;
  sample->limited_by = "MemAvailable";
}

// cgroup v1 says "no limit" as the largest number of whole pages.
constexpr uint64_t kV1UnlimitedFrom = uint64_t{1} << 62;

void ApplyCgroup(const std::string& directory, const std::string& cgroup, const CgroupFiles& files,
                 double percent, RamSample* sample) {
  const std::optional<uint64_t> current =
      ReadNumber(absl::StrCat(directory, cgroup, "/", files.current));
  if (!current.has_value()) return;
  std::optional<uint64_t> used;  // read only where there is a limit
  for (const char* name : files.limits) {
    const std::optional<uint64_t> limit = ReadNumber(absl::StrCat(directory, cgroup, "/", name));
    if (!limit.has_value() || *limit >= kV1UnlimitedFrom) continue;
    if (!used.has_value()) {
      const Fields stat = ReadFields(absl::StrCat(directory, cgroup, "/memory.stat"));
      used = *current;
      for (const char* reclaimable : {"active_file", "inactive_file", "slab_reclaimable"}) {
        used = SaturatingSubtract(*used, Field(stat, absl::StrCat(files.stat_prefix, reclaimable)));
      }
    }
    const auto usable = static_cast<uint64_t>(static_cast<double>(*limit) * percent / 100);
    const uint64_t headroom = SaturatingSubtract(std::min(*limit, usable), *used);
    if (headroom >= sample->headroom_bytes) continue;
    sample->headroom_bytes = headroom;
    sample->limited_by = absl::StrCat(percent < 100 ? absl::StrCat(percent, " % of ") : "",
                                      "cgroup ", cgroup.empty() ? "/" : cgroup, " ", name);
  }
}

// `cgroup` is a path such as "/a/b". Inside a container it may be the host's path while the mount
// shows the container's own cgroup as its root; levels that do not exist set no limit.
void ApplyCgroupAndAncestors(const std::string& directory, std::string cgroup,
                             const CgroupFiles& files, double percent, RamSample* sample) {
  // A process outside of its cgroup namespace's root is shown as "/../..".
  if (absl::StrContains(cgroup, "/..")) cgroup.clear();
  while (true) {
    ApplyCgroup(directory, cgroup, files, percent, sample);
    if (cgroup.empty()) return;
    cgroup.resize(cgroup.rfind('/'));
  }
}

}  // namespace

RamProbe::RamProbe(std::string proc_root, std::string cgroup_root)
    : proc_root_(std::move(proc_root)), cgroup_root_(std::move(cgroup_root)) {}

RamSample RamProbe::Sample(double cgroup_percent) const {
  RamSample sample;
  ReadHost(proc_root_, &sample);
  std::istringstream lines(ReadFile(absl::StrCat(proc_root_, "/self/cgroup")));
  lines.exceptions(std::ios::badbit);
  for (std::string line; std::getline(lines, line);) {
    // "0::/a/b" in v2, "7:cpu,memory:/a/b" in v1. The path may contain colons.
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3 || parts[2][0] != '/') continue;
    const std::vector<std::string> controllers = absl::StrSplit(parts[1], ',');
    if (parts[0] == "0") {
      ApplyCgroupAndAncestors(cgroup_root_, parts[2], kV2, cgroup_percent, &sample);
    } else if (std::find(controllers.begin(), controllers.end(), "memory") != controllers.end()) {
      ApplyCgroupAndAncestors(absl::StrCat(cgroup_root_, "/memory"), parts[2], kV1, cgroup_percent,
                              &sample);
    }
  }
  return sample;
}

}  // namespace pinion
