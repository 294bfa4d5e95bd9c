#include "pinion/allocator/ram/ram_probe.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/read_file.h"

namespace pinion {
namespace {

// Not a table of Abseil's, which does not survive an allocation that throws.
using Fields = std::map<std::string, uint64_t>;

// File names in the two versions of cgroups.
struct CgroupFiles {
  const char* current;
  std::span<const char* const> limits;
  const char* stat_prefix;  // of the fields that include descendants
  const char* stat_limit;   // the field with the least limit up to the root, or null
};
constexpr const char* kV2Limits[] = {"memory.max", "memory.high"};
constexpr const char* kV1Limits[] = {"memory.limit_in_bytes"};
constexpr CgroupFiles kV2 = {"memory.current", kV2Limits, "", nullptr};
constexpr CgroupFiles kV1 = {"memory.usage_in_bytes", kV1Limits, "total_",
                             "hierarchical_memory_limit"};

uint64_t SaturatingSubtract(uint64_t a, uint64_t b) { return a - std::min(a, b); }

// Reads lines like "MemTotal:  16 kB", "Node 0 MemTotal:  16 kB" and "active_file 4096".
Fields ReadFields(const std::string& path) {
  Fields fields;
  const std::string text = ReadFile(path);
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    std::vector<absl::string_view> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
    if (words.size() > 2 && words[0] == "Node") words.erase(words.begin(), words.begin() + 2);
    uint64_t value = 0;
    if (words.size() < 2 || !absl::SimpleAtoi(words[1], &value)) continue;
    const bool is_kib = words.size() > 2 && words[2] == "kB";
    fields[std::string(absl::StripSuffix(words[0], ":"))] = is_kib ? value * 1024 : value;
  }
  return fields;
}

uint64_t Field(const Fields& fields, const std::string& name) {
  const auto found = fields.find(name);
  return found == fields.end() ? 0 : found->second;
}

// Returns nothing if the file is missing or says "max": no limit. (v1 writes a number that is more
// than any host has.)
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

void SetHost(uint64_t total, uint64_t available, const std::string& name, RamSample* sample) {
  sample->total_bytes = total;
  sample->available_bytes = available;
  sample->percent = PsutilPercent(total, available);
  sample->headroom_bytes = available;
  sample->limited_by = name;
}

void ReadHost(const std::string& proc_root, RamSample* sample) {
  const Fields fields = ReadFields(absl::StrCat(proc_root, "/meminfo"));
  const uint64_t total = Field(fields, "MemTotal");
  if (total == 0) return;
  // psutil's rules for kernels and containers with no or an impossible MemAvailable.
  uint64_t available = Field(fields, "MemAvailable");
  const uint64_t free = Field(fields, "MemFree");
  if (available == 0) available = free + Field(fields, "Cached");
  if (available > total) available = free;
  SetHost(total, std::min(available, total), "MemAvailable", sample);
}

// Lowers headroom to `percent` of a limit, less `used`.
void Bound(uint64_t limit, uint64_t used, double percent, const std::string& name,
           RamSample* sample) {
  const auto usable = static_cast<uint64_t>(static_cast<double>(limit) * percent / 100);
  const uint64_t headroom = SaturatingSubtract(std::min(limit, usable), used);
  if (headroom >= sample->headroom_bytes) return;
  sample->headroom_bytes = headroom;
  sample->limited_by = absl::StrCat(percent < 100 ? absl::StrCat(percent, " % of ") : "", name);
}

struct NodeMemory {
  uint64_t total_bytes = 0;
  uint64_t available_bytes = 0;
};

// Estimates the available memory of nodes, because the kernel reports MemAvailable only for the
// whole host. Follows the kernel's si_mem_available (mm/show_mem.c). It leaves out the reserves,
// which are not known per node, and counts half of other reclaimable memory.
NodeMemory MemoryOf(const NumaNodeSet& nodes, const std::string& numa_root) {
  NodeMemory memory;
  for (size_t node = 0; node < nodes.size(); ++node) {
    if (!nodes[node]) continue;
    const Fields fields = ReadFields(absl::StrCat(numa_root, "node", node, "/meminfo"));
    memory.total_bytes += Field(fields, "MemTotal");
    memory.available_bytes += Field(fields, "MemFree") + Field(fields, "Active(file)") +
                              Field(fields, "Inactive(file)") + Field(fields, "KReclaimable") / 2;
  }
  memory.available_bytes = std::min(memory.available_bytes, memory.total_bytes);
  return memory;
}

std::string NodesText(const NumaNodeSet& nodes) {
  return absl::StrCat("NUMA node", nodes.count() == 1 ? " " : "s ", NumaNodeList(nodes));
}

// cgroup v1 reports "no limit" as the largest number of whole pages.
constexpr uint64_t kV1UnlimitedFrom = uint64_t{1} << 62;

void ApplyCgroup(const std::string& directory, const std::string& cgroup, const CgroupFiles& files,
                 double percent, RamSample* sample) {
  const std::string path = absl::StrCat(directory, cgroup, "/");
  const std::optional<uint64_t> current = ReadNumber(path + files.current);
  if (!current.has_value()) return;
  std::vector<std::pair<const char*, uint64_t>> limits;
  for (const char* name : files.limits) {
    if (const auto limit = ReadNumber(path + name); limit.has_value()) {
      limits.emplace_back(name, *limit);
    }
  }
  Fields stat;
  if (files.stat_limit != nullptr) {  // a namespace may hide the ancestors' own files
    stat = ReadFields(path + "memory.stat");
    const auto found = stat.find(files.stat_limit);
    if (found != stat.end()) limits.emplace_back(files.stat_limit, found->second);
  }
  std::erase_if(limits, [](const auto& limit) { return limit.second >= kV1UnlimitedFrom; });
  if (limits.empty()) return;
  if (stat.empty()) stat = ReadFields(path + "memory.stat");
  uint64_t used = *current;
  for (const char* reclaimable : {"active_file", "inactive_file", "slab_reclaimable"}) {
    used = SaturatingSubtract(used, Field(stat, absl::StrCat(files.stat_prefix, reclaimable)));
  }
  for (const auto& [name, limit] : limits) {
    Bound(limit, used, percent, absl::StrCat("cgroup ", cgroup.empty() ? "/" : cgroup, " ", name),
          sample);
  }
}

// `cgroup` is a path such as "/a/b". In a container it may be the host's path, while the mount
// shows the container's cgroup as its root: the path's first parts are not mounted then. A level
// without files sets no limit.
void ApplyCgroupAndAncestors(const std::string& directory, std::string cgroup,
                             const CgroupFiles& files, double percent, RamSample* sample) {
  // A process outside its cgroup namespace's root shows "/../..".
  if (absl::StrContains(cgroup, "/..")) cgroup.clear();
  while (!cgroup.empty() && access((directory + cgroup).c_str(), F_OK) != 0) {
    cgroup.erase(0, cgroup.find('/', 1));
  }
  while (true) {
    ApplyCgroup(directory, cgroup, files, percent, sample);
    if (cgroup.empty()) return;
    cgroup.resize(cgroup.rfind('/'));
  }
}

}  // namespace

RamProbe::RamProbe(std::string proc_root, std::string cgroup_root, std::string numa_root)
    : proc_root_(std::move(proc_root)),
      cgroup_root_(std::move(cgroup_root)),
      numa_root_(std::move(numa_root)),
      nodes_with_memory_(ReadNumaNodes(absl::StrCat(numa_root_, "has_memory"))),
      counted_nodes_(nodes_with_memory_ & ReadNumaNodes(absl::StrCat(numa_root_, "has_cpu"))) {
  // A virtual machine may have all its processors on nodes without memory.
  if (counted_nodes_.none()) counted_nodes_ = nodes_with_memory_;
}

void RamProbe::ApplyNumaNodes(double percent, RamSample* sample) const {
  if (nodes_with_memory_.count() <= 1 || sample->total_bytes == 0) return;
  if (counted_nodes_ != nodes_with_memory_) {
    const NodeMemory host = MemoryOf(counted_nodes_, numa_root_);
    if (host.total_bytes == 0) return;
    SetHost(host.total_bytes, std::min(host.available_bytes, sample->available_bytes),
            absl::StrCat(NodesText(counted_nodes_), " (nodes without processors do not count)"),
            sample);
  }
  const NumaNodeSet in_cpuset = nodes_with_memory_ & NumaNodesOfCpuset(proc_root_);
  const NumaNodeSet usable = NumaNodesOfThread(in_cpuset);
  const NumaNodeSet counted = usable & counted_nodes_;
  if (usable.none() || counted == counted_nodes_) return;
  const NodeMemory memory = MemoryOf(counted, numa_root_);
  if (counted.any() && memory.total_bytes == 0) return;
  const char* const why =
      usable == in_cpuset
          ? "the cpuset of this process allows no other, see Mems_allowed: add nodes to cpuset.mems"
          : "MPOL_BIND, this thread's memory policy, allows no other: numactl --membind binds to "
            "more";
  Bound(memory.total_bytes, memory.total_bytes - memory.available_bytes, percent,
        absl::StrCat(NodesText(counted.any() ? counted : usable),
                     counted.any() ? "" : " without processors", " (", why, ")"),
        sample);
}

RamSample RamProbe::Sample(double percent) const {
  PINION_CHECK(percent >= 0 && percent <= 100)
      << "Sample with " << percent << " % of each limit; it must lie between 0 and 100";
  RamSample sample;
  ReadHost(proc_root_, &sample);
  ApplyNumaNodes(percent, &sample);
  const std::string text = ReadFile(absl::StrCat(proc_root_, "/self/cgroup"));
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    // "0::/a/b" in v2, "7:cpu,memory:/a/b" in v1. The path may contain colons.
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3 || parts[2][0] != '/') continue;
    const std::vector<std::string> controllers = absl::StrSplit(parts[1], ',');
    if (parts[0] == "0") {
      ApplyCgroupAndAncestors(cgroup_root_, parts[2], kV2, percent, &sample);
    } else if (std::find(controllers.begin(), controllers.end(), "memory") != controllers.end()) {
      ApplyCgroupAndAncestors(absl::StrCat(cgroup_root_, "/memory"), parts[2], kV1, percent,
                              &sample);
    }
  }
  return sample;
}

}  // namespace pinion
