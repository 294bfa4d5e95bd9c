// NUMA nodes of this host: whose memory this process may use, where memory lies, which threads are
// near it.
//
// By raw system calls: the little that is needed of libnuma would be one more library for every
// program to link. Containers often forbid these calls (Docker without CAP_SYS_NICE does). Then
// memory comes from any node, and the log says so once a process.
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

// Where the kernel tells of nodes.
inline constexpr char kNumaRoot[] = "/sys/devices/system/node/";

// The numbers of nodes. Linux has at most 1024 nodes.
using NumaNodeSet = std::bitset<1024>;

// Returns the nodes that a file such as /sys/devices/system/node/has_memory lists; none where there
// is no such file.
NumaNodeSet ReadNumaNodes(const std::string& path);

// "0-1,4", as the kernel writes it; "none".
std::string NumaNodeList(const NumaNodeSet& nodes);

// Returns the nodes whose memory the cpuset of this process allows (Mems_allowed); all where the
// kernel does not tell.
NumaNodeSet NumaNodesOfCpuset(const std::string& proc_root = "/proc");

// Returns the nodes of `allowed` that pages of the calling thread can come from. Only MPOL_BIND
// leaves nodes out: every other policy takes memory of further nodes where its own are full.
// `allowed` has the nodes with memory that the cpuset allows.
NumaNodeSet NumaNodesOfThread(const NumaNodeSet& allowed);

// InvalidArgument unless `node` is -1 or a node whose memory this process may use.
absl::Status CheckNumaNode(int node, const std::string& root = kNumaRoot,
                           const std::string& proc_root = "/proc");

// The node that holds all of the range, by looking at one page in every `stride_bytes`. -1: several
// nodes, pages that nobody has touched yet, or the kernel does not tell.
int NumaNodeOf(const void* data, uint64_t size_bytes, uint64_t stride_bytes);

// Pages of the range that are touched from now on come from `node` while it has any, then from the
// nearest others: a full node is a slow page, not a killed process. `data` is a page's beginning.
// Does nothing where containers forbid the call. FailedPrecondition for a node without memory, or
// one that the cpuset of this process leaves out.
absl::Status PreferNumaNode(void* data, uint64_t size_bytes, int node);

// Keeps the calling thread on the CPUs of a node while it lives. Best effort: where that is not
// allowed, or for node -1, nothing happens.
class [[nodiscard]] ScopedNumaThread {
 public:
  [[nodiscard]] explicit ScopedNumaThread(int node, const std::string& root = kNumaRoot);
  ~ScopedNumaThread();
  ScopedNumaThread(const ScopedNumaThread&) = delete;
  ScopedNumaThread& operator=(const ScopedNumaThread&) = delete;

 private:
  std::optional<cpu_set_t> before_;  // where the thread was moved
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_SOURCES_NUMA_H_
