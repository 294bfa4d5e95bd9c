#include "pinion/allocator/sources/page_lock.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/bytes.h"

namespace pinion {
namespace {

// Of this process, as the kernel counts them against RLIMIT_MEMLOCK.
uint64_t LockedBytes() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    uint64_t locked_kib = 0;
    if (word == "VmLck:" && status >> locked_kib) return locked_kib * kKiB;
  }
  return 0;
}

// `error` is mlock2's. The kernel says ENOMEM of a limit as well as of too many mappings.
std::string Remedy(uint64_t size_bytes, int error) {
  constexpr char kRaiseTheLimit[] =
      "; raise it (ulimit -l, LimitMEMLOCK= of a systemd unit, --ulimit memlock= of a container) "
      "or give the process CAP_IPC_LOCK";
  rlimit limit = {};
  getrlimit(RLIMIT_MEMLOCK, &limit);
  const bool limited = limit.rlim_cur != RLIM_INFINITY;
  const uint64_t locked_bytes = LockedBytes();
  const std::string limit_text =
      absl::StrCat("RLIMIT_MEMLOCK is ", limited ? HumanBytes(limit.rlim_cur) : "unlimited",
                   " and ", HumanBytes(locked_bytes), " are locked already");
  switch (error) {
    case EPERM:
      return absl::StrCat("this process may lock nothing: ", limit_text, kRaiseTheLimit);
    case ENOMEM:
      if (limited && locked_bytes + size_bytes > limit.rlim_cur) {
        return absl::StrCat(limit_text, kRaiseTheLimit);
      }
      return absl::StrCat("the process has too many mappings (vm.max_map_count); ", limit_text);
    case EAGAIN:
      return absl::StrCat(
          "not all pages could be had: look at the free memory of the host and of the process's "
          "cgroup; ",
          limit_text);
    default:
      return limit_text;
  }
}

}  // namespace

absl::Status LockPages(void* data, uint64_t size_bytes, unsigned flags) {
  if (mlock2(data, size_bytes, flags) == 0) return absl::OkStatus();
  const int error = errno;
  return absl::ResourceExhaustedError(absl::StrCat("mlock2 of ", HumanBytes(size_bytes), ": ",
                                                   std::strerror(error), ": ",
                                                   Remedy(size_bytes, error)));
}

}  // namespace pinion
