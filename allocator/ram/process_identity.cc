#include "pinion/allocator/ram/process_identity.h"

#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>

#include "absl/strings/str_cat.h"

namespace pinion {
namespace {

// Linux has pids below 2^22. The start is in ticks of 10 ms since boot, which do not fill 42 bits.
constexpr int kStartBits = 42;
constexpr uint64_t kStartMask = (uint64_t{1} << kStartBits) - 1;

// Of this process; 0: not known yet.
std::atomic<ProcessIdentity> cached{0};

// A grandchild may have the pid of the one that looked first, if that has ended.
[[maybe_unused]] const int forgotten_in_child =
    pthread_atfork(nullptr, nullptr, [] { cached = 0; });

struct ProcStat {
  char state = '?';
  uint64_t threads = 0;
  uint64_t start = 0;
};

std::optional<ProcStat> ReadStat(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/stat"));
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  // "pid (name) state ...": the name may hold anything, parentheses and spaces too.
  const size_t name_end = line.rfind(')');
  if (name_end == std::string::npos) return std::nullopt;
  std::istringstream fields(line.substr(name_end + 1));
  ProcStat stat;
  fields >> stat.state;
  std::string skipped;
  for (int field = 4; field < 20; ++field) fields >> skipped;
  fields >> stat.threads >> skipped >> stat.start;
  if (!fields) return std::nullopt;
  return stat;
}

}  // namespace

ProcessIdentity OwnProcess() {
  const auto pid = static_cast<uint64_t>(getpid());
  ProcessIdentity own = cached.load(std::memory_order_relaxed);
  if (own >> kStartBits == pid) return own;
  const std::optional<ProcStat> stat = ReadStat(getpid());
  own = pid << kStartBits | (stat.has_value() ? stat->start & kStartMask : 0);
  cached.store(own, std::memory_order_relaxed);
  return own;
}

bool IsRunning(ProcessIdentity process) {
  const auto pid = static_cast<pid_t>(process >> kStartBits);
  if (pid == 0) return false;
  const std::optional<ProcStat> stat = ReadStat(pid);
  // Without /proc a pid is all that can be asked for.
  if (!stat.has_value()) return kill(pid, 0) == 0 || errno != ESRCH;
  const uint64_t start = process & kStartMask;
  if (start != 0 && start != (stat->start & kStartMask)) return false;
  // Its memory is gone already, unless it is only the first thread that has ended.
  return (stat->state != 'Z' && stat->state != 'X') || stat->threads > 1;
}

uint64_t PidNamespace() {
  struct stat info;
  return stat("/proc/self/ns/pid", &info) == 0 ? info.st_ino : 0;
}

}  // namespace pinion
