#include "pinion/allocator/sources/page_lock.h"

#include <linux/capability.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/bytes.h"

namespace pinion {
namespace {

// The initial user namespace has this number on every kernel (USER_NS_INIT_INO of linux/nsfs.h).
constexpr char kFirstUserNamespace[] = "user:[4026531837]";

// Returns the value of a line of /proc/self/status, or "".
std::string StatusOfProcess(const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word == name && status >> word) return word;
  }
  return "";
}

// Returns the bytes of this process that count against RLIMIT_MEMLOCK.
uint64_t LockedBytes() {
  uint64_t locked_kib = 0;
  return absl::SimpleAtoi(StatusOfProcess("VmLck:"), &locked_kib) ? locked_kib * kKiB : 0;
}

// Returns whether RLIMIT_MEMLOCK does not apply. A capability in a container's own user namespace
// lifts no limit.
bool IsAboveLimits() {
  uint64_t capabilities = 0;
  if (!absl::SimpleHexAtoi(StatusOfProcess("CapEff:"), &capabilities)) return false;
  char user_namespace[32] = {};
  return (capabilities >> CAP_IPC_LOCK & 1) != 0 &&
         readlink("/proc/self/ns/user", user_namespace, sizeof(user_namespace) - 1) > 0 &&
         std::strcmp(user_namespace, kFirstUserNamespace) == 0;
}

// `error` is mlock2's, for a range that is not locked. The kernel returns ENOMEM both for a limit
// and for too many mappings.
std::string Remedy(uint64_t size_bytes, int error) {
  constexpr char kRaiseTheLimit[] =
      "; raise it (ulimit -l, LimitMEMLOCK= of a systemd unit, --ulimit memlock= of a container) "
      "or give the process CAP_IPC_LOCK";
  rlimit limit = {};
  getrlimit(RLIMIT_MEMLOCK, &limit);
  const bool limited = limit.rlim_cur != RLIM_INFINITY && !IsAboveLimits();
  const uint64_t locked_bytes = LockedBytes();
  const std::string limit_text =
      absl::StrCat("RLIMIT_MEMLOCK is ", limited ? HumanBytes(limit.rlim_cur) : "no limit here",
                   " and ", HumanBytes(locked_bytes), " are locked already");
  switch (error) {
    case EPERM:
      // The kernel returns EPERM only for a limit of 0.
      if (!limited || limit.rlim_cur != 0) {
        return absl::StrCat("a seccomp filter or a security module forbids it: ", limit_text);
      }
      return absl::StrCat("this process may lock nothing: ", limit_text, kRaiseTheLimit);
    case ENOMEM:
      if (limited && locked_bytes + size_bytes > limit.rlim_cur) {
        return absl::StrCat(limit_text, kRaiseTheLimit);
      }
      return absl::StrCat(
          "not all of it is mapped, or the process has too many mappings (vm.max_map_count); ",
          limit_text);
    case EAGAIN:
      return absl::StrCat(
          "not all pages could be committed: check the free memory of the host and of the "
          "process's "
          "cgroup; ",
          limit_text);
    default:
      return limit_text;
  }
}

}  // namespace

absl::Status LockPages(void* data, uint64_t size_bytes, unsigned flags) {
  if (data == nullptr || (flags & ~unsigned{MLOCK_ONFAULT}) != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "LockPages of ", HumanBytes(size_bytes), " at ", reinterpret_cast<uintptr_t>(data),
        " with flags ", flags, ": give memory that is mapped, and 0 or MLOCK_ONFAULT"));
  }
  if (mlock2(data, size_bytes, flags) == 0) return absl::OkStatus();
  const int error = errno;
  // The first of MmapSource's two calls may have locked the range. Unlocking it makes VmLck count
  // only the rest of the process.
  UnlockPages(data, size_bytes);
  return absl::ResourceExhaustedError(absl::StrCat("mlock2 of ", HumanBytes(size_bytes), ": ",
                                                   std::strerror(error), ": ",
                                                   Remedy(size_bytes, error)));
}

void UnlockPages(void* data, uint64_t size_bytes) { munlock(data, size_bytes); }

}  // namespace pinion
