// A host whose RAM several processes take: a fixture whose /proc/meminfo shows what they have
// committed. Where they run in a real cgroup, it keeps the same books of them.
//
//   SharedHost host(root, /*make=*/true);      // in the test
//   SharedHost host(root, /*make=*/false);     // in each process that takes part
//   host.Commit(process, 1 * kMiB);            // as if pages had been touched
//
// A process that is killed at any moment leaves the host usable. It replaces meminfo as a whole,
// and the kernel ends its lock. Meminfo shows at least the sum of the counters. Forget returns the
// memory of the killed process.
//
// Thread safety: thread-safe between processes; one thread each.

#ifndef PINION_TESTS_ALLOCATOR_RAM_SHARED_HOST_H_
#define PINION_TESTS_ALLOCATOR_RAM_SHARED_HOST_H_

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <string>

#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/ram/host_ledger.h"
#include "pinion/allocator/ram/ram_probe.h"
#include "pinion/tests/support/fake_host.h"

namespace pinion::testing {

class SharedHost {
 public:
  static constexpr int kProcesses = 8;
  static constexpr uint64_t kTotalBytes = 2 * kGiB;
  static constexpr uint64_t kUsedByOthersBytes = 1780 * kMiB;
  // What is left below 90 %.
  static constexpr uint64_t kRoomBytes = kTotalBytes / 10 * 9 - kUsedByOthersBytes;

  // Zero bytes are its beginning.
  struct State {
    std::atomic<bool> stop;
    std::atomic<uint64_t> growths;
    std::atomic<uint64_t> full;        // processes that were refused for good
    std::atomic<uint64_t> room_bytes;  // what they may commit together
    std::atomic<uint64_t> violations;  // times that more than that was committed
    std::atomic<uint64_t> committed_bytes[kProcesses];
  };

  SharedHost(const std::filesystem::path& root, bool make) : files_(root) {
    fd_ = open((root / "state").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    PINION_CHECK(fd_ >= 0 && ftruncate(fd_, sizeof(State)) == 0);
    void* data = mmap(nullptr, sizeof(State), PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    PINION_CHECK(data != MAP_FAILED);
    state_ = static_cast<State*>(data);
    if (make) {
      state_->room_bytes = kRoomBytes;
      Change(0, 0);
    }
  }
  ~SharedHost() {
    munmap(state_, sizeof(State));
    close(fd_);
  }
  SharedHost(const SharedHost&) = delete;
  SharedHost& operator=(const SharedHost&) = delete;

  State& state() const { return *state_; }
  RamProbe Probe() const { return files_.Probe(); }
  HostLedger Ledger() const { return files_.Ram().ledger; }
  // For RealCgroup::Probe, in place of the above.
  std::filesystem::path real_cgroup_files() const { return files_.root() / "real_cgroup"; }

  uint64_t committed_bytes() const {
    uint64_t sum = 0;
    for (const std::atomic<uint64_t>& bytes : state_->committed_bytes) sum += bytes;
    return sum;
  }

  void Commit(int process, uint64_t size_bytes) {
    Change(process, static_cast<int64_t>(size_bytes));
    ++state_->growths;
  }
  void Release(int process, uint64_t size_bytes) {
    Change(process, -static_cast<int64_t>(size_bytes));
  }
  // The process has ended.
  void Forget(int process) { Release(process, state_->committed_bytes[process]); }

 private:
  void Change(int process, int64_t delta) {
    PINION_CHECK(flock(fd_, LOCK_EX) == 0);
    const uint64_t sum = committed_bytes() + static_cast<uint64_t>(delta);
    if (sum > state_->room_bytes) ++state_->violations;
    std::atomic<uint64_t>& own = state_->committed_bytes[process];
    // A process that dies in between leaves too much in meminfo rather than too little.
    if (delta < 0) own += static_cast<uint64_t>(delta);
    const uint64_t used = kUsedByOthersBytes + sum;
    files_.SetMeminfo(kTotalBytes, kTotalBytes - (used < kTotalBytes ? used : kTotalBytes));
    if (delta > 0) own += static_cast<uint64_t>(delta);
    PINION_CHECK(flock(fd_, LOCK_UN) == 0);
  }

  FakeHost files_;
  int fd_;
  State* state_;
};

}  // namespace pinion::testing

#endif  // PINION_TESTS_ALLOCATOR_RAM_SHARED_HOST_H_
