// A memory cgroup (version 1 or 2) of this machine, below the test's own cgroup.
//
//   const absl::StatusOr<std::unique_ptr<RealCgroup>> cgroup = RealCgroup::Create(256 * kMiB);
//   if (!cgroup.ok()) GTEST_SKIP() << cgroup.status();    // not root, or no memory controller here
//   ... a child process calls RealCgroup::Join((*cgroup)->directory()) first of all ...
//
// The destructor removes the cgroup; its processes must have ended before.
//
// Thread safety: thread-compatible.

#ifndef PINION_TESTS_SUPPORT_REAL_CGROUP_H_
#define PINION_TESTS_SUPPORT_REAL_CGROUP_H_

#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/ram/ram_probe.h"
#include "pinion/tests/support/fake_host.h"

namespace pinion::testing {

class RealCgroup {
 public:
  // Returns FailedPrecondition with the reason if the machine does not allow it.
  static absl::StatusOr<std::unique_ptr<RealCgroup>> Create(uint64_t limit_bytes) {
    const std::filesystem::path own = OwnDirectory();
    if (own.empty()) return absl::FailedPreconditionError("no memory cgroup is mounted");
    std::unique_ptr<RealCgroup> cgroup(
        new RealCgroup(own / absl::StrCat("pinion_test_", getpid())));
    std::error_code error;
    if (!std::filesystem::create_directory(cgroup->directory_, error)) {
      return absl::FailedPreconditionError(
          absl::StrCat("mkdir ", cgroup->directory_.string(), ": ", error.message()));
    }
    for (const char* limit : {"memory.limit_in_bytes", "memory.max"}) {
      if (Write(cgroup->directory_ / limit, std::to_string(limit_bytes)).ok()) return cgroup;
    }
    return absl::FailedPreconditionError(
        absl::StrCat("no limit can be set in ", cgroup->directory_.string(),
                     ": its parent does not pass the memory controller on"));
  }
  ~RealCgroup() {
    for (int attempt = 0; attempt < 100; ++attempt) {
      if (rmdir(directory_.c_str()) == 0 || errno != EBUSY) return;
      usleep(10'000);  // for processes that have just ended
    }
    PINION_LOG(kError) << "cannot remove " << directory_ << ": " << std::strerror(errno);
  }

  // Moves the calling process into the cgroup.
  static void Join(const std::filesystem::path& directory) {
    const absl::Status joined = Write(directory / "cgroup.procs", "0");
    PINION_CHECK(joined.ok()) << joined;
  }

  // Returns a probe of the calling process's cgroups on a host with 1 TiB of free RAM, so that
  // other users of the machine do not affect the test. Keeps its files in `directory`.
  static RamProbe Probe(const std::filesystem::path& directory) {
    FakeHost(directory).SetMeminfo(1024 * kGiB, 1024 * kGiB);
    std::error_code exists_already;
    std::filesystem::create_directory_symlink("/proc/self", directory / "proc/self",
                                              exists_already);
    return RamProbe((directory / "proc").string(), "/sys/fs/cgroup",
                    (directory / "node/").string());
  }

  const std::filesystem::path& directory() const { return directory_; }

  // Return how often a process hit the limit, and how many processes were killed for it.
  uint64_t limit_hits() const {
    return IsV1() ? Number("memory.failcnt") : Field("memory.events", "max");
  }
  uint64_t kills() const {
    return Field(IsV1() ? "memory.oom_control" : "memory.events", "oom_kill");
  }

 private:
  explicit RealCgroup(std::filesystem::path directory) : directory_(std::move(directory)) {}

  // Returns the process's cgroup directory, or an empty path if no memory cgroup is mounted.
  static std::filesystem::path OwnDirectory() {
    std::ifstream file("/proc/self/cgroup");
    for (std::string line; std::getline(file, line);) {
      const bool v2 = line.rfind("0::", 0) == 0;
      const size_t v1 = line.find(":memory:");
      if (!v2 && v1 == std::string::npos) continue;
      const std::filesystem::path directory =
          v2 ? "/sys/fs/cgroup" + line.substr(3) : "/sys/fs/cgroup/memory" + line.substr(v1 + 8);
      if (std::filesystem::exists(directory / (v2 ? "cgroup.procs" : "memory.limit_in_bytes"))) {
        return directory;
      }
    }
    return {};
  }

  static absl::Status Write(const std::filesystem::path& path, const std::string& text) {
    std::ofstream file(path);
    file << text << std::flush;
    return file ? absl::OkStatus()
                : absl::UnavailableError(absl::StrCat(path.string(), ": ", std::strerror(errno)));
  }

  bool IsV1() const { return std::filesystem::exists(directory_ / "memory.failcnt"); }
  uint64_t Number(const std::string& file) const {
    uint64_t number = UINT64_MAX;
    std::ifstream(directory_ / file) >> number;
    return number;
  }
  // Returns UINT64_MAX if the field is missing.
  uint64_t Field(const std::string& file, const std::string& field) const {
    std::ifstream lines(directory_ / file);
    std::string name;
    uint64_t value = 0;
    while (lines >> name >> value) {
      if (name == field) return value;
    }
    return UINT64_MAX;
  }

  const std::filesystem::path directory_;
};

}  // namespace pinion::testing

#endif  // PINION_TESTS_SUPPORT_REAL_CGROUP_H_
