#include "pinion/allocator/sources/numa.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace pinion {
namespace {

std::string ReadLine(const std::string& path) {
  std::string line;
  std::ifstream file(path);
  std::getline(file, line);
  return line;
}

// Calls `visit` with each number of a list like "0-3,8": how the kernel writes nodes and CPUs.
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

}  // namespace

std::string NumaNodes(const std::string& root) { return ReadLine(absl::StrCat(root, "online")); }

bool HasNumaNode(int node, const std::string& root) {
  bool found = false;
  ForEachOf(NumaNodes(root), [&](int number) { found |= number == node; });
  return found;
}

int NumaNodeOf(const void* data, uint64_t size_bytes, uint64_t stride_bytes) {
  std::vector<const void*> pages;
  const char* const begin = static_cast<const char*>(data);
  for (const char* at = begin; at < begin + size_bytes; at += stride_bytes) pages.push_back(at);
  std::vector<int> nodes(pages.size(), -1);
  // Without target nodes, move_pages moves nothing and tells where the pages are. Where it fails,
  // they are on none.
  syscall(SYS_move_pages, /*pid=*/0, pages.size(), pages.data(), nullptr, nodes.data(),
          /*flags=*/0);
  int node = nodes.empty() ? -1 : nodes.front();
  for (const int other : nodes) {
    if (other != node) node = -1;
  }
  return node < 0 ? -1 : node;  // negative: -errno of the page
}

absl::Status PreferNumaNode(void* data, uint64_t size_bytes, int node) {
  constexpr int kBitsPerWord = 8 * sizeof(unsigned long);
  std::vector<unsigned long> nodes(node / kBitsPerWord + 1);
  nodes.back() = 1ul << (node % kBitsPerWord);
  // The kernel reads one bit less than it is told.
  if (syscall(SYS_mbind, data, size_bytes, MPOL_PREFERRED, nodes.data(),
              nodes.size() * kBitsPerWord + 1, /*flags=*/0) == 0) {
    return absl::OkStatus();
  }
  const int error = errno;
  return absl::FailedPreconditionError(
      absl::StrCat("mbind to NUMA node ", node, ": ", std::strerror(error),
                   error == EPERM || error == ENOSYS
                       ? "; a container needs CAP_SYS_NICE for it, or set numa_node to -1"
                       : ""));
}

ScopedNumaThread::ScopedNumaThread(int node, const std::string& root) {
  cpu_set_t before;
  if (node < 0 || sched_getaffinity(0, sizeof(before), &before) != 0) return;
  cpu_set_t near = {};
  ForEachOf(ReadLine(absl::StrCat(root, "node", node, "/cpulist")), [&](int cpu) {
    // CPUs that the program was kept from stay forbidden.
    if (CPU_ISSET(cpu, &before)) CPU_SET(cpu, &near);
  });
  if (sched_setaffinity(0, sizeof(near), &near) == 0) before_ = before;  // EINVAL for none
}

ScopedNumaThread::~ScopedNumaThread() {
  if (before_.has_value()) sched_setaffinity(0, sizeof(*before_), &*before_);
}

}  // namespace pinion
