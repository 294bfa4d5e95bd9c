// Eight processes under one budget for the host's RAM, some of which are killed: on a fixture host,
// and in a real cgroup where the machine lets a test make one.

#include <linux/magic.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/ram/host_ledger.h"
#include "pinion/allocator/ram/ram_probe.h"
#include "pinion/config/build_config.h"
#include "pinion/tests/allocator/ram/shared_host.h"
#include "pinion/tests/support/child_process.h"
#include "pinion/tests/support/fake_host.h"
#include "pinion/tests/support/real_cgroup.h"
#include "pinion/tests/support/real_host_probe.h"

namespace pinion {
namespace {

using ::pinion::testing::ChildProcess;
using ::pinion::testing::FakeHost;
using ::pinion::testing::RealCgroup;
using ::pinion::testing::RealHostProbe;
using ::pinion::testing::SharedHost;

// Rounds of killing one process and starting another; a sanitizer's processes start slowly.
constexpr int kRounds = config::kHardened ? 60 : 200;

// What they commit at a time.
constexpr uint64_t kSegmentBytes = 2 * kMiB;

class HostBudgetTest : public ::testing::Test {
 protected:
  ~HostBudgetTest() override {
    for (const pid_t pid : pids_) {
      if (pid == 0) continue;
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
    }
  }

  void Start(int process, uint64_t seed, const std::string& what) {
    std::vector<std::string> words = {"tests/allocator/ram/growing_process", files_.root().string(),
                                      std::to_string(process), std::to_string(seed), what};
    if (cgroup_ != nullptr) words.push_back(cgroup_->directory().string());
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    ASSERT_EQ(
        posix_spawn(&pids_[process], arguments[0], nullptr, nullptr, arguments.data(), environ), 0)
        << "run it with bazel test";
  }
  void StartAll(const std::string& what) {
    for (int process = 0; process < SharedHost::kProcesses; ++process) {
      Start(process, static_cast<uint64_t>(process), what);
    }
  }

  static void Await(const std::function<bool()>& condition) {
    while (!condition()) absl::SleepFor(absl::Milliseconds(1));
  }

  // The exit status, or minus the signal that ended it.
  int Wait(int process) {
    int status = 0;
    EXPECT_EQ(waitpid(pids_[process], &status, 0), pids_[process]);
    pids_[process] = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

  void Kill(int process) {
    ASSERT_EQ(kill(pids_[process], SIGKILL), 0);
    ASSERT_EQ(Wait(process), -SIGKILL);
    host_.Forget(process);
  }

  // All have ended well, took no more than there was room for, and left nothing behind.
  void ExpectAllStop() {
    host_.state().stop = true;
    for (int process = 0; process < SharedHost::kProcesses; ++process) {
      EXPECT_EQ(Wait(process), 0);
    }
    EXPECT_EQ(host_.committed_bytes(), 0u);
    EXPECT_EQ(ledger_.reserved_bytes(), 0u);
    EXPECT_EQ(host_.state().violations, 0u);
  }

  // One process after another is killed, or stopped for a moment.
  void ChurnAndKill(int rounds) {
    const uint64_t seed = std::random_device()();
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    StartAll("churn");
    for (int round = 0; round < rounds && !HasFailure(); ++round) {
      const int stopped = static_cast<int>(random() % SharedHost::kProcesses);
      const int killed = static_cast<int>(random() % SharedHost::kProcesses);
      ASSERT_EQ(kill(pids_[stopped], SIGSTOP), 0);
      absl::SleepFor(absl::Microseconds(static_cast<int64_t>(random() % 3000)));
      ASSERT_EQ(kill(pids_[stopped], SIGCONT), 0);
      Kill(killed);
      Start(killed, random(), "churn");
    }
    // Those that are left go on growing.
    const uint64_t growths = host_.state().growths;
    Await([&] { return host_.state().growths >= growths + 100; });
    ExpectAllStop();
  }

  FakeHost files_;
  SharedHost host_{files_.root(), /*make=*/true};
  const HostLedger ledger_ = host_.Ledger();
  std::unique_ptr<RealCgroup> cgroup_;  // null: on the fixture host
  std::array<pid_t, SharedHost::kProcesses> pids_ = {};
};

// In peers each rank takes all RAM for its own (sglang#29263, DeepSpeed#2841).
// Each reads the kernel's numbers before it pins, as ranks of a training job do. Without the ledger
// they pass the mark together. A ledger that charges twice stops them short of it.
TEST_F(HostBudgetTest, ProcessesThatGrowAtOnceFillTheRoomBelowTheMarkAndNoMore) {
  StartAll("fill");
  Await([&] { return host_.committed_bytes() + kSegmentBytes > SharedHost::kRoomBytes; });
  ExpectAllStop();
}

TEST_F(HostBudgetTest, ProcessesThatAreKilledAtAnyMomentLeaveNoShareAndHoldUpNobody) {
  ChurnAndKill(kRounds);
}

TEST_F(HostBudgetTest, AfterAllWereKilledTheRoomIsThereAgain) {
  StartAll("churn");
  Await([&] { return host_.state().growths >= 50; });
  for (int process = 0; process < SharedHost::kProcesses; ++process) Kill(process);
  EXPECT_EQ(ledger_.reserved_bytes(), 0u);
  StartAll("fill");
  Await([&] { return host_.committed_bytes() + kSegmentBytes > SharedHost::kRoomBytes; });
  ExpectAllStop();
}

// --- The kernel's own numbers, and its own killer ---

class RealHostBudgetTest : public HostBudgetTest {
 protected:
  static constexpr uint64_t kLimitBytes = 512 * kMiB;
  // Below the high mark, 90 %.
  static constexpr uint64_t kRoomBytes = kLimitBytes / 10 * 9;

  void SetUp() override {
    const RamSample machine = RealHostProbe().Sample(90);
    if (machine.headroom_bytes < 2 * kLimitBytes) {
      GTEST_SKIP() << machine.limited_by << " leaves " << machine.headroom_bytes
                   << " bytes, which are too few to fill a cgroup of " << kLimitBytes;
    }
    absl::StatusOr<std::unique_ptr<RealCgroup>> cgroup = RealCgroup::Create(kLimitBytes);
    if (!cgroup.ok()) GTEST_SKIP() << cgroup.status();
    cgroup_ = *std::move(cgroup);
    host_.state().room_bytes = kRoomBytes;
  }
  void TearDown() override {
    if (cgroup_ == nullptr) return;
    EXPECT_EQ(cgroup_->kills(), 0u);
    EXPECT_EQ(cgroup_->limit_hits(), 0u) << "the kernel had to make room";
  }

  RamProbe RealProbe() const { return RealCgroup::Probe(host_.real_cgroup_files()); }
  // What the cgroup leaves below its high mark.
  uint64_t RoomLeft() {
    uint64_t headroom_bytes = UINT64_MAX;
    int result[2];
    EXPECT_EQ(pipe(result), 0);
    ChildProcess child([&] {
      RealCgroup::Join(cgroup_->directory());
      const uint64_t left = RealProbe().Sample(90).headroom_bytes;
      EXPECT_EQ(write(result[1], &left, sizeof(left)), static_cast<ssize_t>(sizeof(left)));
    });
    EXPECT_EQ(child.Wait(), 0);
    EXPECT_EQ(read(result[0], &headroom_bytes, sizeof(headroom_bytes)),
              static_cast<ssize_t>(sizeof(headroom_bytes)));
    close(result[0]);
    close(result[1]);
    return headroom_bytes;
  }
};

TEST_F(RealHostBudgetTest, ProcessesThatGrowAtOnceFillARealCgroupUpToTheMark) {
  StartAll("fill");
  Await([&] { return host_.state().full == SharedHost::kProcesses; });
  EXPECT_LT(RoomLeft(), 2 * kSegmentBytes);
  ExpectAllStop();
}

TEST_F(RealHostBudgetTest, TheMemoryOfAKilledProcessGoesToTheNext) {
  StartAll("fill");
  Await([&] { return host_.state().full == SharedHost::kProcesses; });
  const uint64_t before = host_.committed_bytes();
  const uint64_t share = host_.state().committed_bytes[3];
  Kill(3);
  EXPECT_EQ(ledger_.reserved_bytes(), 0u);
  Start(3, 3, "fill");
  Await([&] { return host_.state().full == SharedHost::kProcesses + 1; });
  EXPECT_GE(host_.state().committed_bytes[3] + kSegmentBytes, share);
  EXPECT_GE(host_.committed_bytes() + kSegmentBytes, before);
  ExpectAllStop();
}

TEST_F(RealHostBudgetTest, ProcessesThatAreKilledAtAnyMomentHoldUpNobody) {
  // The kernel has a dead process's memory back before the books do. It keeps the limit itself.
  host_.state().room_bytes = UINT64_MAX;
  ChurnAndKill(kRounds / 4);
}

TEST_F(RealHostBudgetTest, TheProbeSeesWhatAProcessTouches) {
  ChildProcess child([&] {
    RealCgroup::Join(cgroup_->directory());
    const RamSample before = RealProbe().Sample();
    EXPECT_NE(before.limited_by.find(cgroup_->directory().filename().string()), std::string::npos)
        << before.limited_by;
    EXPECT_LE(before.headroom_bytes, kLimitBytes);
    EXPECT_GE(before.headroom_bytes, kLimitBytes / 2);
    constexpr uint64_t kTouchedBytes = 64 * kMiB;
    void* const data =
        mmap(nullptr, kTouchedBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(data, MAP_FAILED);
    EXPECT_NEAR(static_cast<double>(RealProbe().Sample().headroom_bytes),
                static_cast<double>(before.headroom_bytes), static_cast<double>(kSegmentBytes));
    std::memset(data, 1, kTouchedBytes);
    EXPECT_NEAR(static_cast<double>(RealProbe().Sample().headroom_bytes + kTouchedBytes),
                static_cast<double>(before.headroom_bytes), static_cast<double>(kSegmentBytes));
  });
  EXPECT_EQ(child.Wait(), 0);
}

// The kernel drops it before it kills anyone.
TEST_F(RealHostBudgetTest, ToTheProbeTheCacheOfFilesIsFree) {
  struct statfs files;
  ASSERT_EQ(statfs(files_.root().c_str(), &files), 0);
  if (files.f_type == TMPFS_MAGIC) GTEST_SKIP() << "here files are memory that stays";
  ChildProcess child([&] {
    RealCgroup::Join(cgroup_->directory());
    const RamSample before = RealProbe().Sample();
    std::ofstream(files_.root() / "cached") << std::string(64 * kMiB, 'x');
    EXPECT_NEAR(static_cast<double>(RealProbe().Sample().headroom_bytes),
                static_cast<double>(before.headroom_bytes), static_cast<double>(8 * kMiB));
  });
  EXPECT_EQ(child.Wait(), 0);
}

}  // namespace
}  // namespace pinion
