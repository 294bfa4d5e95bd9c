// Eight processes under one budget for the host's RAM, some of which are killed.

#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/host_ledger.h"
#include "pinion/config/build_config.h"
#include "pinion/tests/allocator/shared_host.h"
#include "pinion/tests/support/fake_host.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace {

using ::pinion::testing::FakeHost;
using ::pinion::testing::IsOk;
using ::pinion::testing::SharedHost;

// Rounds of killing one process and starting another; a sanitizer's processes start slowly.
constexpr int kRounds = config::kHardened ? 60 : 200;

class HostBudgetTest : public ::testing::Test {
 protected:
  HostBudgetTest() : ledger_name_("/pinion_budget_test_" + std::to_string(getpid())) {
    shm_unlink(ledger_name_.c_str());
    ledger_ = HostLedger::Open(ledger_name_).value();
  }
  ~HostBudgetTest() override {
    for (const pid_t pid : pids_) {
      if (pid == 0) continue;
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
    }
    shm_unlink(ledger_name_.c_str());
  }

  void Start(int process, uint64_t seed, const std::string& what) {
    std::vector<std::string> words = {
        "tests/allocator/growing_process", files_.root().string(), ledger_name_,
        std::to_string(process),           std::to_string(seed),   what};
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    ASSERT_EQ(
        posix_spawn(&pids_[process], arguments[0], nullptr, nullptr, arguments.data(), environ), 0)
        << "run it with bazel test";
  }

  // The exit status, or minus the signal that ended it.
  int Wait(int process) {
    int status = 0;
    EXPECT_EQ(waitpid(pids_[process], &status, 0), pids_[process]);
    pids_[process] = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

  void ExpectAllStop() {
    host_.state().stop = true;
    for (int process = 0; process < SharedHost::kProcesses; ++process) {
      EXPECT_EQ(Wait(process), 0);
    }
    EXPECT_EQ(host_.committed_bytes(), 0u);
    EXPECT_EQ(ledger_->reserved_bytes(), 0u);
    EXPECT_EQ(host_.state().violations, 0u);
  }

  FakeHost files_;
  SharedHost host_{files_.root(), /*make=*/true};
  const std::string ledger_name_;
  std::shared_ptr<HostLedger> ledger_;
  std::array<pid_t, SharedHost::kProcesses> pids_ = {};
};

// Each looks at the kernel's numbers before it pins, as ranks of a training job do: without the
// ledger they pass the mark together; if it charged twice, they would stop short of it.
TEST_F(HostBudgetTest, ProcessesThatGrowAtOnceFillTheRoomBelowTheMarkAndNoMore) {
  for (int process = 0; process < SharedHost::kProcesses; ++process) {
    Start(process, static_cast<uint64_t>(process), "fill");
  }
  while (host_.committed_bytes() + kMiB <= SharedHost::kRoomBytes) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  ExpectAllStop();
}

TEST_F(HostBudgetTest, ProcessesThatAreKilledAtAnyMomentLeaveNoShareAndHoldUpNobody) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  for (int process = 0; process < SharedHost::kProcesses; ++process) {
    Start(process, random(), "churn");
  }
  for (int round = 0; round < kRounds; ++round) {
    const int stopped = static_cast<int>(random() % SharedHost::kProcesses);
    const int killed = static_cast<int>(random() % SharedHost::kProcesses);
    ASSERT_EQ(kill(pids_[stopped], SIGSTOP), 0);
    absl::SleepFor(absl::Microseconds(static_cast<int64_t>(random() % 3000)));
    ASSERT_EQ(kill(pids_[stopped], SIGCONT), 0);
    ASSERT_EQ(kill(pids_[killed], SIGKILL), 0);
    ASSERT_EQ(Wait(killed), -SIGKILL);
    host_.Forget(killed);
    Start(killed, random(), "churn");
  }
  // Those that are left go on growing.
  const uint64_t growths = host_.state().growths;
  while (host_.state().growths < growths + 100) absl::SleepFor(absl::Milliseconds(1));
  ExpectAllStop();
}

TEST_F(HostBudgetTest, AfterAllWereKilledTheRoomIsThereAgain) {
  for (int process = 0; process < SharedHost::kProcesses; ++process) {
    Start(process, static_cast<uint64_t>(process), "churn");
  }
  while (host_.state().growths < 50) absl::SleepFor(absl::Milliseconds(1));
  for (const pid_t pid : pids_) ASSERT_EQ(kill(pid, SIGKILL), 0);
  for (int process = 0; process < SharedHost::kProcesses; ++process) {
    EXPECT_EQ(Wait(process), -SIGKILL);
    host_.Forget(process);
  }
  EXPECT_EQ(ledger_->reserved_bytes(), 0u);
  for (int process = 0; process < SharedHost::kProcesses; ++process) {
    Start(process, static_cast<uint64_t>(process), "fill");
  }
  while (host_.committed_bytes() + kMiB <= SharedHost::kRoomBytes) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  ExpectAllStop();
}

}  // namespace
}  // namespace pinion
