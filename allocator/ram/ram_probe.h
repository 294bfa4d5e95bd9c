// Reads how much RAM the host has left, and how much of it this process may take.
//
//   const RamSample sample = RamProbe().Sample();
//   sample.percent         // psutil.virtual_memory().percent
//   sample.headroom_bytes  // ... and what a container's limits leave of it
//
// Headroom is the minimum of MemAvailable and of this term for the process's memory cgroup and each
// of its ancestors (v2 and v1):
//
//   min(max, high) - (current - active_file - inactive_file - slab_reclaimable)
//
// Page cache is part of `current`, but the kernel drops it before it kills a process. The field
// `file` must not be subtracted, because it contains shared memory.
//
// If the calling thread can use only some NUMA nodes (Mems_allowed of its cpuset, or MPOL_BIND),
// the kernel kills once these are full. Headroom is then at most what they have left. The memory of
// nodes without processors (a GPU's on GH200) counts in no field.
//
// `percent` of Sample applies to the limits of cgroups and nodes, because the kernel kills at a
// limit and the rest of the program is charged to it too.
//
// A missing file sets no limit. A limit of 0 means zero bytes; "max" and v1's huge numbers mean no
// limit.
//
// Thread safety: thread-safe. A call reads a few files (tens of microseconds). On a host with
// several nodes it reads one more, and one for each node to check.

#ifndef PINION_ALLOCATOR_RAM_RAM_PROBE_H_
#define PINION_ALLOCATOR_RAM_RAM_PROBE_H_

#include <cstdint>
#include <string>

#include "pinion/allocator/sources/numa.h"

namespace pinion {

struct RamSample {
  uint64_t total_bytes = 0;  // 0: unknown
  uint64_t available_bytes = 0;
  double percent = 0;  // (total - available) / total * 100, rounded to one decimal as psutil does
  uint64_t headroom_bytes = UINT64_MAX;  // UINT64_MAX: no known limit
  // The limit that headroom_bytes comes from: "MemAvailable", "90 % of cgroup /a/b memory.max", "90
  // % of NUMA node 0 (...)" with the reason and remedy. "" if there is no limit.
  std::string limited_by;
};

class RamProbe {
 public:
  RamProbe() : RamProbe("/proc", "/sys/fs/cgroup", kNumaRoot) {}
  // Tests pass directories with files of their own.
  RamProbe(std::string proc_root, std::string cgroup_root, std::string numa_root);

  // `percent` is the usable part of the limits of cgroups and NUMA nodes.
  RamSample Sample(double percent = 100) const;

 private:
  void ApplyNumaNodes(double percent, RamSample* sample) const;

  std::string proc_root_;
  std::string cgroup_root_;
  std::string numa_root_;
  // At the construction of the probe.
  NumaNodeSet nodes_with_memory_;
  NumaNodeSet counted_nodes_;
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_RAM_RAM_PROBE_H_
