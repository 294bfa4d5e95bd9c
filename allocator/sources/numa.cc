#include "pinion/allocator/sources/numa.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <optional>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/read_file.h"

namespace pinion {
namespace {

constexpr int kBitsPerWord = 8 * sizeof(unsigned long);
constexpr int kMostNodes = static_cast<int>(NumaNodeSet().size());

// Calls `visit` with each number of a list like "0-3,8", the kernel's notation for nodes and CPUs.
template <typename Visit>
void ForEachOf(const std::string& list, const Visit& visit) {
  for (const auto piece : absl::StrSplit(list, ',', absl::SkipWhitespace())) {
    const std::pair<absl::string_view, absl::string_view> ends =
        absl::StrSplit(piece, absl::MaxSplits('-', 1));
    int first = 0;
    int last = 0;
    if (!absl::SimpleAtoi(ends.first, &first)) return;
    if (!absl::SimpleAtoi(ends.second, &last)) last = first;
    for (int number = first; number <= last; ++number) visit(number);
  }
}

NumaNodeSet ParseNodes(const std::string& list) {
  NumaNodeSet nodes;
  ForEachOf(list, [&](int node) {
    if (node >= 0 && node < kMostNodes) nodes.set(node);
  });
  return nodes;
}

void WarnThatCallIsForbidden(const char* call, int error) {
  static std::atomic<bool> has_warned = false;
  if (has_warned.exchange(true)) return;
  PINION_LOG(kWarning) << call << ": " << std::strerror(error)
                       << "; NUMA calls are forbidden here: memory comes from any node, and the "
                          "headroom of host RAM counts nodes that a memory policy leaves out. A "
                          "container allows the calls with CAP_SYS_NICE (docker run --cap-add)";
}

void WarnThatNodeIsOutOfReach(int node) {
  static std::atomic<bool> has_warned = false;
  if (has_warned.exchange(true)) return;
  PINION_LOG(kWarning) << "the system allows this thread no CPU of NUMA node " << node
                       << ": memory for the devices of that node may come from another node, and "
                          "copies be slower. Add CPUs of the node to the process (taskset, "
                          "docker run --cpuset-cpus)";
}

}  // namespace

NumaNodeSet ReadNumaNodes(const std::string& path) { return ParseNodes(ReadFile(path)); }

std::string NumaNodeList(const NumaNodeSet& nodes) {
  std::string list;
  for (int node = 0; node < kMostNodes; ++node) {
    if (!nodes[node]) continue;
    const int first = node;
    while (node + 1 < kMostNodes && nodes[node + 1]) ++node;
    absl::StrAppend(&list, list.empty() ? "" : ",", first);
    if (node > first) absl::StrAppend(&list, "-", node);
  }
  return list.empty() ? "none" : list;
}

NumaNodeSet NumaNodesOfCpuset(const std::string& proc_root) {
  std::string status = ReadFile(absl::StrCat(proc_root, "/thread-self/status"));
  // Kernels before 3.17 lack thread-self.
  if (status.empty()) status = ReadFile(absl::StrCat(proc_root, "/self/status"));
  for (absl::string_view line : absl::StrSplit(status, '\n')) {
    if (absl::ConsumePrefix(&line, "Mems_allowed_list:")) return ParseNodes(std::string(line));
  }
  return NumaNodeSet().set();
}

NumaNodeSet NumaNodesOfThread(const NumaNodeSet& allowed) {
  int policy = 0;
  unsigned long words[kMostNodes / kBitsPerWord] = {};
  // The kernel writes one bit less than the given size.
  if (syscall(SYS_get_mempolicy, &policy, words, kMostNodes + 1ul, nullptr, 0ul) != 0) {
    WarnThatCallIsForbidden("get_mempolicy", errno);
    return allowed;
  }
  constexpr int kFlags = MPOL_F_STATIC_NODES | MPOL_F_RELATIVE_NODES | 1 << 13;  // NUMA_BALANCING
  if ((policy & ~kFlags) != MPOL_BIND) return allowed;
  std::vector<int> numbers;  // the nodes that relative numbers index
  for (int node = 0; node < kMostNodes; ++node) {
    if (allowed[node]) numbers.push_back(node);
  }
  NumaNodeSet bound;
  for (int node = 0; node < kMostNodes; ++node) {
    if ((words[node / kBitsPerWord] >> (node % kBitsPerWord) & 1) == 0) continue;
    const bool is_relative = (policy & MPOL_F_RELATIVE_NODES) != 0 && !numbers.empty();
    bound.set(is_relative ? numbers[node % numbers.size()] : node);
  }
  bound &= allowed;
  // The kernel ignores a policy that has no node in common with the cpuset.
  return bound.none() ? allowed : bound;
}

absl::Status CheckNumaNode(int node, const std::string& root, const std::string& proc_root) {
  if (node == -1) return absl::OkStatus();
  const NumaNodeSet with_memory = ReadNumaNodes(absl::StrCat(root, "has_memory"));
  const NumaNodeSet usable = with_memory & NumaNodesOfCpuset(proc_root);
  const auto is_among = [&](const NumaNodeSet& nodes) {
    return node >= 0 && node < kMostNodes && nodes[node];
  };
  if (is_among(usable)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "numa_node is ", node, "; it must be -1 or a node whose memory this process may use (",
      NumaNodeList(usable), ")",
      is_among(with_memory) ? "; its cpuset leaves this node out (Mems_allowed): add the node to "
                              "cpuset.mems, of a container by docker run --cpuset-mems"
                            : ""));
}

int NumaNodeOf(const void* data, uint64_t size_bytes, uint64_t stride_bytes) {
  PINION_CHECK(stride_bytes > 0) << "NumaNodeOf: stride_bytes is 0; it must be positive";
  constexpr size_t kPagesOfACall = 512;
  std::optional<int> node;
  for (uint64_t offset = 0; offset < size_bytes;) {
    std::vector<const void*> pages;
    while (offset < size_bytes && pages.size() < kPagesOfACall) {
      pages.push_back(static_cast<const char*>(data) + offset);
      offset += std::min(stride_bytes, size_bytes - offset);
    }
    std::vector<int> nodes(pages.size(), -1);
    // Without target nodes, move_pages moves nothing and reports where pages are. If it fails,
    // `nodes` keeps -1.
    syscall(SYS_move_pages, /*pid=*/0, pages.size(), pages.data(), nullptr, nodes.data(),
            /*flags=*/0);
    if (!node.has_value()) node = nodes.front();
    if (*node < 0) return -1;  // -errno of the page
    if (std::any_of(nodes.begin(), nodes.end(), [&](int other) { return other != *node; })) {
      return -1;
    }
  }
  return node.value_or(-1);
}

absl::Status PreferNumaNode(void* data, uint64_t size_bytes, int node) {
  if (node < 0 || node >= kMostNodes) {
    return absl::InvalidArgumentError(
        absl::StrCat("PreferNumaNode ", node, "; it must lie between 0 and ", kMostNodes - 1));
  }
  std::vector<unsigned long> nodes(node / kBitsPerWord + 1);
  nodes.back() = 1ul << (node % kBitsPerWord);
  // The kernel reads one bit less than the given size.
  if (syscall(SYS_mbind, data, size_bytes, MPOL_PREFERRED, nodes.data(),
              nodes.size() * kBitsPerWord + 1, /*flags=*/0) == 0) {
    return absl::OkStatus();
  }
  const int error = errno;
  if (error == EPERM || error == ENOSYS) {
    WarnThatCallIsForbidden("mbind", error);
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      absl::StrCat("mbind to NUMA node ", node, ": ", std::strerror(error),
                   "; set numa_node to -1 or to a node with memory that the cpuset of this process "
                   "allows (",
                   NumaNodeList(NumaNodesOfCpuset()), ")"));
}

ScopedNumaThread::ScopedNumaThread(int node, const std::string& root) {
  cpu_set_t before;
  if (node < 0 || sched_getaffinity(0, sizeof(before), &before) != 0) return;
  cpu_set_t near = {};
  bool has_cpus = false;
  ForEachOf(ReadFile(absl::StrCat(root, "node", node, "/cpulist")), [&](int cpu) {
    has_cpus = true;
    // Respects the CPUs that the program excluded.
    if (CPU_ISSET(cpu, &before)) CPU_SET(cpu, &near);
  });
  if (sched_setaffinity(0, sizeof(near), &near) == 0) {  // EINVAL for none
    before_ = before;
  } else if (errno == EPERM || errno == ENOSYS) {
    WarnThatCallIsForbidden("sched_setaffinity", errno);
  } else if (has_cpus) {
    WarnThatNodeIsOutOfReach(node);
  }
}

ScopedNumaThread::~ScopedNumaThread() {
  if (before_.has_value()) sched_setaffinity(0, sizeof(*before_), &*before_);
}

}  // namespace pinion
