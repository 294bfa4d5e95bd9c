// NUMA nodes of this host: which there are, where memory lies, which threads are near it.
//
// By raw system calls: the little that is needed of libnuma would be one more library for every
// program to link. Containers often forbid these calls (Docker without CAP_SYS_NICE does).
//
// Thread safety: thread-safe.

#ifndef PINION_ALLOCATOR_SOURCES_NUMA_H_
#define PINION_ALLOCATOR_SOURCES_NUMA_H_

#include <sched.h>

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"

namespace pinion {

// Where the kernel tells of nodes.
inline constexpr char kNumaRoot[] = "/sys/devices/system/node/";

// As the kernel writes them: "0", "0-1,4". Empty where it does not tell.
std::string NumaNodes(const std::string& root = kNumaRoot);
bool HasNumaNode(int node, const std::string& root = kNumaRoot);

// The node that holds all of the range, by looking at one page in every `stride_bytes`. -1: several
// nodes, pages that nobody has touched yet, or the kernel does not tell.
int NumaNodeOf(const void* data, uint64_t size_bytes, uint64_t stride_bytes);

// Pages of the range that are touched from now on come from `node` while it has any, then from the
// nearest others: a full node is a slow page, not a killed process. `data` is a page's beginning.
// FailedPrecondition where the system does not let us.
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
