// Gives tests a host with ample RAM, so that other users of the machine do not affect them.
//
// Replaces open(2), by which the library reads such files (allocator/base/read_file.h). RamProbe()
// then finds 1 TiB of RAM on NUMA node 0, of which PINION_TEST_USED_PERCENT is in use, and no limit
// of a cgroup. On one node it asks for no memory policy, which a container may forbid. The ledger
// of this user is a file of the test's own, in $TEST_TMPDIR or /tmp. Every pinion_test links it,
// and RunProgram loads it into programs. A test that replaces open itself passes
// other paths to OpenOnRoomyHost. Tests about the real host use RealHostProbe (real_host_probe.h).

// The fortified header makes open an inline function, which cannot be replaced.
#undef _FORTIFY_SOURCE

#include "pinion/tests/support/roomy_host.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#ifndef PINION_TEST_USED_PERCENT
#define PINION_TEST_USED_PERCENT 0
#endif

namespace {

constexpr long kTotalKib = 1l << 30;
constexpr long kAvailableKib = kTotalKib * (100 - PINION_TEST_USED_PERCENT) / 100;

int OpenText(const std::string& text) {
  const int file = memfd_create("roomy_host", MFD_CLOEXEC);
  if (file < 0 || pwrite(file, text.data(), text.size(), 0) >= 0) return file;
  close(file);
  return -1;
}

int OpenMeminfo() {
  return OpenText("MemTotal: " + std::to_string(kTotalKib) +
                  " kB\nMemAvailable: " + std::to_string(kAvailableKib) + " kB\n");
}

// The test's child processes find the same file.
constexpr std::string_view kLedger = "/dev/shm/pinion_ledger_";

int OpenLedger(std::string_view path, int flags, mode_t mode) {
  const char* const directory = std::getenv("TEST_TMPDIR");
  char own[PATH_MAX];
  std::snprintf(own, sizeof(own), "%s/%s_of_test_%d", directory != nullptr ? directory : "/tmp",
                path.substr(path.rfind('/') + 1).data(), getpgrp());
  return static_cast<int>(syscall(SYS_openat, AT_FDCWD, own, flags, mode));
}

bool IsHidden(std::string_view path) {
  return path == "/proc/self/cgroup" ||
         (path.starts_with("/sys/devices/system/node/") &&
          (path.ends_with("/meminfo") || path.ends_with("/has_cpu")));
}

}  // namespace

int pinion::testing::OpenOnRoomyHost(const char* path, int flags, mode_t mode) {
  if (std::string_view(path) == "/proc/meminfo") return OpenMeminfo();
  if (std::string_view(path) == "/sys/devices/system/node/has_memory") return OpenText("0\n");
  if (IsHidden(path)) {
    errno = ENOENT;
    return -1;
  }
  if (std::string_view(path).starts_with(kLedger)) return OpenLedger(path, flags, mode);
  return static_cast<int>(syscall(SYS_openat, AT_FDCWD, path, flags, mode));
}

// Weak, because some tests replace open themselves.
extern "C" [[gnu::weak, gnu::visibility("default")]] int open(const char* path, int flags, ...) {
  std::va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & (O_CREAT | __O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  return pinion::testing::OpenOnRoomyHost(path, flags, mode);
}
