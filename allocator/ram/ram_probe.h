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
// A cgroup's limit is where the kernel begins to kill, and the program's own growth is charged to
// it too: a policy that stops at 90 % of the host samples with 90 % of each limit.
//
// A file that is missing sets no limit. A limit of 0 means zero bytes; "max" and v1's huge numbers
// mean no limit.
//
// Thread safety: thread-safe. Each call opens a few files (tens of microseconds).

#ifndef PINION_ALLOCATOR_RAM_RAM_PROBE_H_
#define PINION_ALLOCATOR_RAM_RAM_PROBE_H_

#include <cstdint>
#include <string>

namespace pinion {

struct RamSample {
  uint64_t total_bytes = 0;  // 0: unknown
  uint64_t available_bytes = 0;
  double percent = 0;  // (total - available) / total * 100, rounded to one decimal as psutil does
  uint64_t headroom_bytes = UINT64_MAX;  // UINT64_MAX: nothing is known to limit it
  // What set headroom_bytes: "MemAvailable", "cgroup /a/b memory.max", "90 % of cgroup /a/b
  // memory.max"; "" when nothing did.
  std::string limited_by;
};

class RamProbe {
 public:
  RamProbe() : RamProbe("/proc", "/sys/fs/cgroup") {}
  // Tests give directories with files of their own.
  RamProbe(std::string proc_root, std::string cgroup_root);

  // `cgroup_percent`: how much of a cgroup's limit counts.
  RamSample Sample(double cgroup_percent = 100) const;

 private:
  std::string proc_root_;
  std::string cgroup_root_;
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_RAM_RAM_PROBE_H_
