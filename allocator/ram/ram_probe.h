// Reads how much RAM the host has left, and how much of it the process may take.
//
//   const RamSample sample = RamProbe().Sample();
//   sample.percent         // psutil.virtual_memory().percent
//   sample.headroom_bytes  // ... and what a container's limits leave of it
//
// psutil's percentage knows only the host. Headroom is the minimum over MemAvailable and, for the
// process's memory cgroup and each of its ancestors (v2 and v1),
//   min(max, high) - (current - active_file - inactive_file - slab_reclaimable):
// page cache counts as used in `current`, but the kernel gives it up before it kills anyone.
// `file` as a whole must not be subtracted: it contains shared memory, which stays.
//
// Where the calling thread can use the memory of some NUMA nodes alone (Mems_allowed of its cpuset,
// or MPOL_BIND), the kernel kills once these are full, so headroom is at most what they have left.
// The memory of nodes without processors (a GPU's on GH200) counts in no field.
//
// A limit is where the kernel begins to kill, and the program's own growth is charged to it too: a
// policy that stops at 90 % of the host samples with 90 % of each cgroup's limit, and of the memory
// of the nodes that it can use.
//
// A file that is missing sets no limit. A limit of 0 means zero bytes; "max" and v1's huge numbers
// mean no limit.
//
// Thread safety: thread-safe. Each call opens a few files (tens of microseconds). On a host with
// several nodes it opens one more, and one for each node that it has to look at.

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
  uint64_t headroom_bytes = UINT64_MAX;  // UINT64_MAX: nothing is known to limit it
  // What set headroom_bytes: "MemAvailable", "cgroup /a/b memory.max", "90 % of cgroup /a/b
  // memory.max", "90 % of NUMA node 0 (...)" with why and the remedy; "" when nothing did.
  std::string limited_by;
};

class RamProbe {
 public:
  RamProbe() : RamProbe("/proc", "/sys/fs/cgroup", kNumaRoot) {}
  // Tests give directories with files of their own.
  RamProbe(std::string proc_root, std::string cgroup_root, std::string numa_root);

  // `percent`: how much of a limit counts, a cgroup's or that of the NUMA nodes.
  RamSample Sample(double percent = 100) const;

 private:
  void ApplyNumaNodes(double percent, RamSample* sample) const;

  std::string proc_root_;
  std::string cgroup_root_;
  std::string numa_root_;
  // As they were when the probe was made.
  NumaNodeSet nodes_with_memory_;
  NumaNodeSet counted_nodes_;
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_RAM_RAM_PROBE_H_
