// NUMA nodes of this host: the nodes that this process may use, the node of a range, and threads
// near a node.
//
// Uses raw system calls, to spare programs a dependency on libnuma. Many containers forbid these
// calls (Docker without CAP_SYS_NICE). Memory then comes from any node, and the log says so once.
//
// Thread safety: thread-safe.

#ifndef PINION_ALLOCATOR_SOURCES_NUMA_H_
#define PINION_ALLOCATOR_SOURCES_NUMA_H_

#include <sched.h>

#include <bitset>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"

namespace pinion {

// Directory of the kernel's node files.
inline constexpr char kNumaRoot[] = "/sys/devices/system/node/";

// A set of node numbers. Linux has at most 1024 nodes.
using NumaNodeSet = std::bitset<1024>;

// Returns the nodes that a file such as /sys/devices/system/node/has_memory lists. None if there is
// no such file.
NumaNodeSet ReadNumaNodes(const std::string& path);

// Returns "0-1,4", in the kernel's notation, or "none".
std::string NumaNodeList(const NumaNodeSet& nodes);

// Returns the nodes that the cpuset of the calling thread allows (Mems_allowed), or all nodes if
// that is unknown.
NumaNodeSet NumaNodesOfCpuset(const std::string& proc_root = "/proc");

// Returns the nodes of `allowed` that the calling thread's pages can come from. Only MPOL_BIND
// excludes nodes: other policies fall back to further nodes. `allowed` must be the nodes with
// memory that the cpuset allows.
NumaNodeSet NumaNodesOfThread(const NumaNodeSet& allowed);

// Returns InvalidArgument unless `node` is -1 or a node that this process may use.
absl::Status CheckNumaNode(int node, const std::string& root = kNumaRoot,
                           const std::string& proc_root = "/proc");

// Returns the node of the range, by querying one page in every `stride_bytes`. Returns -1 for
// several nodes, for untouched pages, or if the node is unknown.
int NumaNodeOf(const void* data, uint64_t size_bytes, uint64_t stride_bytes);

// Makes pages of the range that are touched later come from `node`, or from the nearest nodes once
// it is full. `data` is page-aligned. Does nothing where a container forbids the call. Returns
// InvalidArgument for a number that no node can have, and FailedPrecondition for a node without
// memory or outside of the cpuset.
absl::Status PreferNumaNode(void* data, uint64_t size_bytes, int node);

// Keeps the calling thread on the CPUs of a node during its lifetime. Does nothing for node -1, and
// for a node without CPUs. If the system forbids it, the log says so once.
class [[nodiscard]] ScopedNumaThread {
 public:
  [[nodiscard]] explicit ScopedNumaThread(int node, const std::string& root = kNumaRoot);
  ~ScopedNumaThread();
  ScopedNumaThread(const ScopedNumaThread&) = delete;
  ScopedNumaThread& operator=(const ScopedNumaThread&) = delete;

 private:
  std::optional<cpu_set_t> before_;  // set if the thread was moved
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_SOURCES_NUMA_H_
