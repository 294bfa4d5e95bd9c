// A directory that imitates /proc, /sys/fs/cgroup and /sys/devices/system/node for a RamProbe.
//
//   FakeHost host;
//   host.SetMeminfo(/*total_bytes=*/16 * kGiB, /*available_bytes=*/8 * kGiB);
//   host.Write("proc/self/cgroup", "0::/a/b\n");
//   host.Write("cgroup/a/memory.max", "max\n");
//   RamProbe probe = host.Probe();
//
// Thread safety: one writer at a time; any number of concurrent readers.

#ifndef PINION_TESTS_SUPPORT_FAKE_HOST_H_
#define PINION_TESTS_SUPPORT_FAKE_HOST_H_

#include <stdlib.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>

#include "gtest/gtest.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/ram/host_ledger.h"
#include "pinion/allocator/ram/host_ram.h"
#include "pinion/allocator/ram/ram_probe.h"

namespace pinion::testing {

class FakeHost {
 public:
  FakeHost() {
    std::string pattern = ::testing::TempDir() + "pinion_host_XXXXXX";
    PINION_CHECK(mkdtemp(pattern.data()) != nullptr) << pattern;
    root_ = pattern;
  }
  // Uses a directory of another process, which the destructor keeps.
  explicit FakeHost(std::filesystem::path root) : root_(std::move(root)), owned_(false) {}
  ~FakeHost() {
    if (owned_) std::filesystem::remove_all(root_);
  }
  FakeHost(const FakeHost&) = delete;
  FakeHost& operator=(const FakeHost&) = delete;

  // Replaces the file atomically and creates its directories. `path` is relative.
  void Write(const std::string& path, const std::string& text) {
    const std::filesystem::path full = root_ / path;
    const std::filesystem::path draft = full.string() + "." + std::to_string(getpid());
    std::filesystem::create_directories(full.parent_path());
    std::ofstream(draft) << text;
    std::filesystem::rename(draft, full);
  }

  void SetMeminfo(uint64_t total_bytes, uint64_t available_bytes) {
    Write("proc/meminfo", "MemTotal:       " + std::to_string(total_bytes / 1024) +
                              " kB\nMemFree:        1 kB\nMemAvailable:   " +
                              std::to_string(available_bytes / 1024) + " kB\n");
  }

  // Sets the nodes with memory and with processors, in the kernel's format, e.g. "0-1". Call it
  // before Probe().
  void SetNodes(const std::string& with_memory, const std::string& with_processors) {
    Write("node/has_memory", with_memory + "\n");
    Write("node/has_cpu", with_processors + "\n");
  }
  void SetNode(int node, uint64_t total_bytes, uint64_t free_bytes, const std::string& lines = "") {
    const std::string name = "Node " + std::to_string(node);
    Write("node/node" + std::to_string(node) + "/meminfo",
          name + " MemTotal:       " + std::to_string(total_bytes / 1024) + " kB\n" + name +
              " MemFree:        " + std::to_string(free_bytes / 1024) + " kB\n" + lines);
  }

  const std::filesystem::path& root() const { return root_; }

  RamProbe Probe() const {
    return RamProbe((root_ / "proc").string(), (root_ / "cgroup").string(),
                    (root_ / "node/").string());
  }
  // With a ledger in root().
  HostRam Ram() const { return {Probe(), HostLedger::InDirectory(root_.string()).value()}; }

 private:
  std::filesystem::path root_;
  const bool owned_ = true;
};

}  // namespace pinion::testing

#endif  // PINION_TESTS_SUPPORT_FAKE_HOST_H_
