#include "pinion/allocator/ram/host_ledger.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/ram/process_identity.h"
#include "pinion/tests/support/child_process.h"
#include "pinion/tests/support/run_threads.h"
#include "pinion/tests/support/status_matchers.h"

// The C library's, which fail with EINTR as often as they are told to. Kernels interrupt them too
// rarely for a test.
namespace {
int interruptions_of_open = 0;
int interruptions_of_fallocate = 0;
int error_of_fallocate = 0;
// Of what shm_open returns: a file that is only for writing cannot be mapped.
int access_of_open = O_RDWR;
bool opened_is_closed = false;
// Called once, before a file is locked as one that is in use.
std::function<void()> before_shared_lock;
}  // namespace

extern "C" int flock(int fd, int operation) noexcept {
  if ((operation & LOCK_SH) != 0 && before_shared_lock) std::exchange(before_shared_lock, {})();
  return static_cast<int>(syscall(SYS_flock, fd, operation));
}

extern "C" int shm_open(const char* name, int flags, mode_t mode) {
  if (interruptions_of_open > 0) {
    --interruptions_of_open;
    errno = EINTR;
    return -1;
  }
  flags = (flags & ~O_ACCMODE) | access_of_open | O_NOFOLLOW | O_CLOEXEC;
  const int fd = open((std::string("/dev/shm") + name).c_str(), flags, mode);
  if (opened_is_closed) close(fd);
  return fd;
}

extern "C" int posix_fallocate(int fd, off_t offset, off_t size_bytes) {
  if (interruptions_of_fallocate > 0) {
    --interruptions_of_fallocate;
    return EINTR;
  }
  if (error_of_fallocate != 0) return error_of_fallocate;
  return syscall(SYS_fallocate, fd, 0, offset, size_bytes) == 0 ? 0 : errno;
}

namespace pinion {
namespace {

using ::pinion::testing::ChildProcess;
using ::pinion::testing::Gate;
using ::pinion::testing::IsOk;
using ::pinion::testing::RunThreads;
using ::pinion::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

using Reservation = HostLedger::Reservation;

class HostLedgerTest : public ::testing::Test {
 protected:
  HostLedgerTest() : name_("/pinion_ledger_test_" + std::to_string(getpid())) {
    shm_unlink(name_.c_str());
  }
  ~HostLedgerTest() override { shm_unlink(name_.c_str()); }

  std::shared_ptr<HostLedger> Open() const {
    absl::StatusOr<std::shared_ptr<HostLedger>> ledger = HostLedger::Open(name_);
    EXPECT_THAT(ledger, IsOk());
    return ledger.ok() ? *std::move(ledger) : HostLedger::Private();
  }

  // How often this process has the file mapped.
  int Mappings() const {
    std::ifstream maps("/proc/self/maps");
    int count = 0;
    for (std::string line; std::getline(maps, line);) {
      if (line.find(name_) != std::string::npos) ++count;
    }
    return count;
  }

  // What others left under the name.
  void WriteFile(const std::string& bytes) const {
    const int fd = shm_open(name_.c_str(), O_RDWR | O_CREAT, 0600);
    ASSERT_GE(fd, 0);
    ASSERT_EQ(write(fd, bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
    close(fd);
  }

  bool FileIsThere() const { return FileIsThere(name_); }
  static bool FileIsThere(const std::string& name) {
    return std::filesystem::exists("/dev/shm" + name);
  }

  const std::string name_;
};

TEST_F(HostLedgerTest, AReservationCountsUntilItIsCommittedOrDropped) {
  const std::shared_ptr<HostLedger> ledger = Open();
  std::optional<Reservation> dropped = ledger->Reserve(5).value();
  Reservation committed = ledger->Reserve(7).value();
  EXPECT_EQ(ledger->reserved_bytes(), 12u);
  dropped.reset();
  EXPECT_EQ(ledger->reserved_bytes(), 7u);
  std::move(committed).Commit();
  EXPECT_EQ(ledger->reserved_bytes(), 0u);
}

TEST_F(HostLedgerTest, AMovedReservationIsGivenBackOnce) {
  const std::shared_ptr<HostLedger> ledger = HostLedger::Private();
  {
    Reservation first = ledger->Reserve(5).value();
    const Reservation second = std::move(first);
    EXPECT_EQ(ledger->reserved_bytes(), 5u);
  }
  EXPECT_EQ(ledger->reserved_bytes(), 0u);
}

// Two that came at once and counted each other would both be refused.
TEST_F(HostLedgerTest, OnlyWhatWasReservedBeforeIsAhead) {
  const std::shared_ptr<HostLedger> ledger = Open();
  const Reservation first = ledger->Reserve(1).value();
  std::optional<Reservation> second = ledger->Reserve(10).value();
  const Reservation third = ledger->Reserve(100).value();
  EXPECT_EQ(first.BytesAhead(), 0u);
  EXPECT_EQ(second->BytesAhead(), 1u);
  EXPECT_EQ(third.BytesAhead(), 11u);
  second.reset();
  EXPECT_EQ(third.BytesAhead(), 1u);
  // In the place that became free.
  const Reservation fourth = ledger->Reserve(1000).value();
  EXPECT_EQ(fourth.BytesAhead(), 101u);
  EXPECT_EQ(third.BytesAhead(), 1u);
}

TEST_F(HostLedgerTest, OneNameIsOneLedger) {
  const Reservation reservation = Open()->Reserve(5).value();
  EXPECT_EQ(Open()->reserved_bytes(), 5u);
  EXPECT_EQ(HostLedger::Private()->reserved_bytes(), 0u);
}

TEST_F(HostLedgerTest, AFileIsMappedAndOpenOnceForAsLongAsItIsNeeded) {
  const auto open_files = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
  };
  const auto files_before = open_files();
  std::shared_ptr<HostLedger> ledger = Open();
  std::vector<Reservation> held;
  for (int i = 0; i < 3; ++i) held.push_back(ledger->Reserve(1).value());
  ledger.reset();
  EXPECT_EQ(Mappings(), 1);
  EXPECT_EQ(open_files(), files_before + 1);
  held.clear();
  EXPECT_EQ(Mappings(), 0);
  EXPECT_EQ(open_files(), files_before);
}

TEST_F(HostLedgerTest, TheFileIsOfThisUserAlone) {
  const std::shared_ptr<HostLedger> ledger = Open();
  struct stat info;
  ASSERT_EQ(stat(("/dev/shm" + name_).c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777u, 0600u);
}

TEST_F(HostLedgerTest, WhatIsCommittedLetsGoOfNothingElseLater) {
  const std::shared_ptr<HostLedger> ledger = HostLedger::Private();
  std::optional<Reservation> committed = ledger->Reserve(5).value();
  std::move(*committed).Commit();
  const Reservation next = ledger->Reserve(7).value();  // in the same place of the table
  committed.reset();
  EXPECT_EQ(ledger->reserved_bytes(), 7u);
}

TEST_F(HostLedgerTest, AnEmptyFileBecomesAsLongAsTheTable) {
  const std::shared_ptr<HostLedger> ledger = Open();
  EXPECT_EQ(std::filesystem::file_size("/dev/shm" + name_),
            sizeof(uint64_t) * (1 + 3 * HostLedger::kMaxReservations));
}

TEST_F(HostLedgerTest, AReservationOutlivesItsLedger) {
  std::optional<Reservation> reservation = HostLedger::Private()->Reserve(5).value();
  EXPECT_EQ(reservation->BytesAhead(), 0u);
  reservation.reset();
}

TEST_F(HostLedgerTest, WhenAllSlotsAreTakenThatIsAnError) {
  const std::shared_ptr<HostLedger> ledger = Open();
  std::vector<Reservation> held;
  for (int i = 0; i < HostLedger::kMaxReservations; ++i) held.push_back(*ledger->Reserve(1));
  EXPECT_THAT(ledger->Reserve(1), StatusIs(absl::StatusCode::kResourceExhausted,
                                           HasSubstr("too many growths at once")));
  EXPECT_EQ(ledger->reserved_bytes(), static_cast<uint64_t>(HostLedger::kMaxReservations));
  held.pop_back();
  EXPECT_THAT(ledger->Reserve(1), IsOk());
}

// Whoever comes last counts all others: otherwise they would pass a mark together.
TEST_F(HostLedgerTest, OfThreadsThatReserveAtOnceTheLastCountsAll) {
  const std::shared_ptr<HostLedger> ledger = Open();
  constexpr int kThreads = 4;
  for (int round = 0; round < 200; ++round) {
    std::vector<std::optional<Reservation>> held(kThreads);
    std::vector<uint64_t> ahead(kThreads);
    RunThreads(kThreads, [&](int thread) {
      held[thread].emplace(ledger->Reserve(1).value());
      ahead[thread] = held[thread]->BytesAhead();
    });
    uint64_t most = 0;
    for (const uint64_t bytes : ahead) most = std::max(most, bytes);
    ASSERT_EQ(most, kThreads - 1u);
  }
}

// --- Processes ---

TEST_F(HostLedgerTest, AProcessSeesWhatAnotherReserves) {
  const std::shared_ptr<HostLedger> ledger = Open();
  Gate reserved;
  Gate may_end;
  ChildProcess child([&] {
    const Reservation reservation = Open()->Reserve(5).value();
    reserved.Open();
    may_end.Pass();
  });
  reserved.Pass();
  EXPECT_EQ(ledger->reserved_bytes(), 5u);
  EXPECT_EQ(ledger->Reserve(1)->BytesAhead(), 5u);
  may_end.Open();
  EXPECT_EQ(child.Wait(), 0);
  EXPECT_EQ(ledger->reserved_bytes(), 0u);
}

TEST_F(HostLedgerTest, TheShareOfAKilledProcessReturns) {
  const std::shared_ptr<HostLedger> ledger = Open();
  Gate reserved;
  ChildProcess child([&] {
    std::vector<Reservation> held;
    for (int i = 0; i < HostLedger::kMaxReservations; ++i) held.push_back(*ledger->Reserve(1));
    reserved.Open();
    Gate::WaitForEver();
  });
  reserved.Pass();
  EXPECT_THAT(ledger->Reserve(1), Not(IsOk()));
  child.Kill();
  child.AwaitEnd();
  // Nobody has looked since: the place of the dead is taken directly.
  EXPECT_THAT(ledger->Reserve(1), IsOk());
  EXPECT_EQ(ledger->reserved_bytes(), 0u);
  EXPECT_EQ(child.Wait(), -SIGKILL);
}

TEST_F(HostLedgerTest, OnlyThePlaceOfTheDeadIsTaken) {
  const std::shared_ptr<HostLedger> ledger = Open();
  Gate reserved;
  ChildProcess child([&] {
    const Reservation first = ledger->Reserve(1000).value();
    reserved.Open();
    Gate::WaitForEver();
  });
  reserved.Pass();
  std::vector<Reservation> alive;
  for (int i = 1; i < HostLedger::kMaxReservations; ++i) alive.push_back(*ledger->Reserve(1));
  child.Kill();
  child.AwaitEnd();
  const Reservation late = ledger->Reserve(10).value();
  EXPECT_EQ(late.BytesAhead(), alive.size());
  EXPECT_EQ(ledger->reserved_bytes(), alive.size() + 10);
  EXPECT_THAT(ledger->Reserve(1), Not(IsOk()));
  EXPECT_EQ(child.Wait(), -SIGKILL);
}

TEST_F(HostLedgerTest, AStoppedProcessKeepsItsShareAndHoldsUpNobody) {
  const std::shared_ptr<HostLedger> ledger = Open();
  Gate reserved;
  ChildProcess child([&] {
    const Reservation reservation = ledger->Reserve(5).value();
    reserved.Open();
    Gate::WaitForEver();
  });
  reserved.Pass();
  ASSERT_EQ(kill(child.pid(), SIGSTOP), 0);
  EXPECT_EQ(ledger->Reserve(1)->BytesAhead(), 5u);
}

TEST_F(HostLedgerTest, AChildOfForkHasNoReservation) {
  for (const std::shared_ptr<HostLedger>& ledger : {Open(), HostLedger::Private()}) {
    std::optional<Reservation> reservation = ledger->Reserve(5).value();
    ChildProcess child([&] {
      reservation.reset();  // the child's copy
      EXPECT_THAT(ledger->Reserve(1), IsOk());
    });
    EXPECT_EQ(child.Wait(), 0);
    EXPECT_EQ(ledger->reserved_bytes(), 5u);
  }
}

TEST_F(HostLedgerTest, WhatTheParentReservesForItselfIsNothingToAChild) {
  const std::shared_ptr<HostLedger> ledger = HostLedger::Private();
  const Reservation reservation = ledger->Reserve(5).value();
  ChildProcess child([&] { EXPECT_EQ(ledger->reserved_bytes(), 0u); });
  EXPECT_EQ(child.Wait(), 0);
}

// --- In the midst of a reservation ---

// The words of the table (host_ledger.h), as another process finds them.
struct Words {
  struct Slot {
    std::atomic<uint64_t> owner;
    std::atomic<uint64_t> size_bytes;
    std::atomic<uint64_t> turn;
  };
  std::atomic<uint64_t> last_turn;
  Slot slots[HostLedger::kMaxReservations];
};

class HostLedgerWordsTest : public HostLedgerTest {
 protected:
  HostLedgerWordsTest() : ledger_(Open()) {
    const int fd = shm_open(name_.c_str(), O_RDWR, 0);
    void* const data = mmap(nullptr, sizeof(Words), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    PINION_CHECK(fd >= 0 && data != MAP_FAILED);
    close(fd);
    words_ = static_cast<Words*>(data);
  }
  ~HostLedgerWordsTest() override { munmap(words_, sizeof(Words)); }

  const std::shared_ptr<HostLedger> ledger_;
  Words* words_;
};

// A reservation that is still drawing its turn may come before or behind whoever looks: if neither
// counted the other, both might pin.
TEST_F(HostLedgerWordsTest, AReservationThatHasNoTurnYetIsAheadOfEverybody) {
  Words::Slot& slot = words_->slots[7];
  slot.owner = OwnProcess();
  slot.size_bytes = 5;
  slot.turn = 0;
  EXPECT_EQ(ledger_->Reserve(1)->BytesAhead(), 5u);
  slot.turn = 100;  // behind the next ones
  EXPECT_EQ(ledger_->Reserve(1)->BytesAhead(), 0u);
}

// A child reserves one instruction at a time, and the table is looked at after each of them.
TEST_F(HostLedgerWordsTest, WhoeverDrawsALaterTurnSeesTheBytes) {
  const Words::Slot& slot = words_->slots[0];
  words_->slots[0].turn = UINT64_MAX;  // as somebody who has overwritten the table left it
  const uint64_t turn_before = words_->last_turn;
  constexpr int kMayNotBeTraced = 2;
  ChildProcess child([&] {
    if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) _exit(kMayNotBeTraced);
    raise(SIGSTOP);
    const Reservation reservation = ledger_->Reserve(5).value();
    raise(SIGSTOP);
  });
  siginfo_t info;
  const auto await_stop = [&] {  // leaves a child that has ended to `child`
    return waitid(P_PID, child.pid(), &info, WEXITED | WSTOPPED | WNOWAIT) == 0 &&
           info.si_code == CLD_TRAPPED;
  };
  const bool stopped = await_stop();
  if (!stopped && info.si_status == kMayNotBeTraced) {
    GTEST_SKIP() << "this system does not let a process trace its child";
  }
  ASSERT_TRUE(stopped);
  uint64_t steps = 0;
  do {
    ASSERT_EQ(ptrace(PTRACE_SINGLESTEP, child.pid(), nullptr, nullptr), 0);
    ASSERT_TRUE(await_stop());
    ++steps;
    if (words_->last_turn == turn_before) continue;
    ASSERT_EQ(slot.size_bytes, 5u) << "at step " << steps << " a turn was drawn without them";
    ASSERT_LE(slot.turn, turn_before + 1) << "at step " << steps << " they seem to come later";
  } while (info.si_status == SIGTRAP);
  EXPECT_EQ(words_->last_turn, turn_before + 1);
  EXPECT_EQ(slot.turn, turn_before + 1);
}

// --- Who removes the file ---

TEST_F(HostLedgerTest, TheLastUserRemovesTheFile) {
  std::shared_ptr<HostLedger> first = Open();
  std::shared_ptr<HostLedger> second = Open();
  std::optional<Reservation> reservation = second->Reserve(5).value();
  first.reset();
  second.reset();
  EXPECT_TRUE(FileIsThere()) << "somebody has a reservation";
  reservation.reset();
  EXPECT_FALSE(FileIsThere());
}

TEST_F(HostLedgerTest, AFileThatAnotherProcessUsesStaysUntilThatEnds) {
  std::shared_ptr<HostLedger> ledger = Open();
  Gate opened;
  Gate may_end;
  ChildProcess child([&] {
    ledger.reset();  // the parent's
    EXPECT_TRUE(FileIsThere());
    const std::shared_ptr<HostLedger> own = Open();
    opened.Open();
    may_end.Pass();
  });
  opened.Pass();
  ledger.reset();
  EXPECT_TRUE(FileIsThere());
  may_end.Open();
  EXPECT_EQ(child.Wait(), 0);
  EXPECT_FALSE(FileIsThere());
}

TEST_F(HostLedgerTest, TheFileOfAKilledProcessGoesWithTheNextUser) {
  Gate opened;
  ChildProcess child([&] {
    const std::shared_ptr<HostLedger> ledger = Open();
    opened.Open();
    Gate::WaitForEver();
  });
  opened.Pass();
  child.Kill();
  EXPECT_EQ(child.Wait(), -SIGKILL);
  EXPECT_TRUE(FileIsThere());
  Open();
  EXPECT_FALSE(FileIsThere());
}

// A namespace that is no more has nobody who would open its file.
TEST_F(HostLedgerTest, FilesOfOtherNamespacesAreRemovedOnceNobodyUsesThem) {
  const std::string prefix = "/pinion_ledger_2_uid" + std::to_string(geteuid()) + "_pidns";
  const std::string left = prefix + "1_test" + std::to_string(getpid());
  const std::string used = prefix + "2_test" + std::to_string(getpid());
  ASSERT_TRUE(std::ofstream("/dev/shm" + left).good());
  const std::shared_ptr<HostLedger> user = HostLedger::Open(used).value();
  ASSERT_TRUE(FileIsThere(left) && FileIsThere(used));
  HostLedger::OfThisUser();
  EXPECT_FALSE(FileIsThere(left));
  EXPECT_TRUE(FileIsThere(used));
}

// Whoever opened it just before would reserve in a table that nobody else finds.
TEST_F(HostLedgerTest, AFileThatIsRemovedWhileItIsOpenedIsOpenedAnew) {
  before_shared_lock = [this] { EXPECT_EQ(shm_unlink(name_.c_str()), 0); };
  const std::shared_ptr<HostLedger> early = Open();
  EXPECT_TRUE(FileIsThere());
  const Reservation reservation = early->Reserve(5).value();
  EXPECT_EQ(Open()->reserved_bytes(), 5u);
}

TEST_F(HostLedgerTest, WhoeverIsStoppedWhileItRemovesTheFileHoldsUpNobody) {
  WriteFile("");
  const int fd = shm_open(name_.c_str(), O_RDWR, 0);
  ASSERT_EQ(flock(fd, LOCK_EX), 0);
  const std::shared_ptr<HostLedger> ledger = Open();
  EXPECT_THAT(ledger->Reserve(5), IsOk());
  close(fd);
}

// --- In a directory ---

class HostLedgerDirectoryTest : public HostLedgerTest {
 protected:
  HostLedgerDirectoryTest() : directory_(::testing::TempDir() + name_) {
    std::filesystem::create_directories(directory_);
  }
  ~HostLedgerDirectoryTest() override {
    EXPECT_TRUE(std::filesystem::is_empty(directory_)) << "the last user removes the file";
    std::filesystem::remove_all(directory_);
  }

  std::shared_ptr<HostLedger> Join() const {
    absl::StatusOr<std::shared_ptr<HostLedger>> ledger = HostLedger::InDirectory(directory_);
    EXPECT_THAT(ledger, IsOk());
    return ledger.ok() ? *std::move(ledger) : HostLedger::Private();
  }

  const std::string directory_;
};

TEST_F(HostLedgerDirectoryTest, ProcessesShareItUntilTheyAreKilled) {
  const std::shared_ptr<HostLedger> ledger = Join();
  const Reservation own = ledger->Reserve(100).value();
  Gate reserved;
  ChildProcess child([&] {
    const Reservation reservation = Join()->Reserve(5).value();
    EXPECT_EQ(reservation.BytesAhead(), 100u);
    reserved.Open();
    Gate::WaitForEver();
  });
  reserved.Pass();
  EXPECT_EQ(ledger->reserved_bytes(), 105u);
  EXPECT_EQ(ledger->Reserve(1)->BytesAhead(), 105u);
  child.Kill();
  EXPECT_EQ(child.Wait(), -SIGKILL);
  EXPECT_EQ(ledger->reserved_bytes(), 100u);
}

// There, pids are others: this one is 1.
TEST_F(HostLedgerDirectoryTest, AProcessOfAnotherPidNamespaceIsKnownToLiveAndToHaveDied) {
  constexpr int kCannotBeTried = 2;
  const std::shared_ptr<HostLedger> ledger = Join();
  Gate reserved;
  Gate may_be_killed;
  Gate killed;
  Gate may_end;
  ChildProcess child([&] {
    if (unshare(CLONE_NEWPID) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWPID) != 0) {
      reserved.Open();
      _exit(kCannotBeTried);
    }
    ChildProcess first_of_namespace([&] {
      EXPECT_EQ(getpid(), 1);
      const Reservation reservation = Join()->Reserve(5).value();
      reserved.Open();
      Gate::WaitForEver();
    });
    may_be_killed.Pass();
    first_of_namespace.Kill();
    EXPECT_EQ(first_of_namespace.Wait(), -SIGKILL);
    killed.Open();
    may_end.Pass();
  });
  reserved.Pass();
  if (ledger->reserved_bytes() == 0) {
    ASSERT_EQ(child.Wait(), kCannotBeTried);
    GTEST_SKIP() << "this system lets nobody make a pid namespace";
  }
  EXPECT_EQ(ledger->Reserve(1)->BytesAhead(), 5u);
  may_be_killed.Open();
  killed.Pass();
  EXPECT_EQ(ledger->reserved_bytes(), 0u);
  may_end.Open();
  EXPECT_EQ(child.Wait(), 0);
}

// Its place is locked again, by somebody else.
TEST_F(HostLedgerDirectoryTest, WhoeverTakesThePlaceOfTheDeadDoesNotKeepTheirShare) {
  const std::shared_ptr<HostLedger> ledger = Join();
  Gate reserved;
  ChildProcess child([&] {
    const Reservation reservation = Join()->Reserve(5).value();
    reserved.Open();
    Gate::WaitForEver();
  });
  reserved.Pass();
  child.Kill();
  EXPECT_EQ(child.Wait(), -SIGKILL);
  const std::shared_ptr<HostLedger> next = Join();
  EXPECT_EQ(ledger->reserved_bytes(), 0u);
  const Reservation reservation = next->Reserve(7).value();
  EXPECT_EQ(ledger->reserved_bytes(), 7u);
}

TEST_F(HostLedgerDirectoryTest, AChildOfForkHasNoReservationAndReservesForItself) {
  const std::shared_ptr<HostLedger> ledger = Join();
  std::optional<Reservation> reservation = ledger->Reserve(5).value();
  Gate reserved;
  Gate may_end;
  ChildProcess child([&] {
    reservation.reset();  // the child's copy
    const Reservation own = ledger->Reserve(7).value();
    EXPECT_EQ(own.BytesAhead(), 5u);
    reserved.Open();
    may_end.Pass();
  });
  reserved.Pass();
  EXPECT_EQ(ledger->reserved_bytes(), 12u);
  may_end.Open();
  EXPECT_EQ(child.Wait(), 0);
  EXPECT_EQ(ledger->reserved_bytes(), 5u);
}

// Locks are shared with children; a worker that lives on would keep its parent's share for ever.
TEST_F(HostLedgerDirectoryTest, TheShareOfAKilledParentReturnsThoughItsChildLives) {
  const std::shared_ptr<HostLedger> ledger = Join();
  Gate reserved;
  Gate child_may_end;
  ChildProcess parent([&] {
    const Reservation reservation = Join()->Reserve(5).value();
    if (fork() == 0) {
      reserved.Open();
      child_may_end.Pass();
      _exit(0);
    }
    Gate::WaitForEver();
  });
  reserved.Pass();
  EXPECT_EQ(ledger->reserved_bytes(), 5u);
  parent.Kill();
  EXPECT_EQ(parent.Wait(), -SIGKILL);
  EXPECT_EQ(ledger->reserved_bytes(), 0u);
  child_may_end.Open();
}

TEST_F(HostLedgerDirectoryTest, AProgramThatClosesAllFilesReservesAnew) {
  const std::shared_ptr<HostLedger> other = Join();
  ChildProcess child([&] {
    const std::shared_ptr<HostLedger> ledger = Join();
    close_range(3, UINT_MAX, 0);
    const Reservation reservation = ledger->Reserve(5).value();
    EXPECT_EQ(Join()->reserved_bytes(), 5u);
  });
  EXPECT_EQ(child.Wait(), 0);
}

TEST_F(HostLedgerDirectoryTest, WithMoreUsersThanItHasPlacesThatIsAnError) {
  rlimit files = {};
  getrlimit(RLIMIT_NOFILE, &files);
  if (files.rlim_cur < 2000) GTEST_SKIP() << "a process may not open so many files";
  std::vector<std::shared_ptr<HostLedger>> users;
  absl::Status refused;
  while (refused.ok() && users.size() < 2000) {
    absl::StatusOr<std::shared_ptr<HostLedger>> user = HostLedger::InDirectory(directory_);
    refused = user.status();
    if (user.ok()) users.push_back(*std::move(user));
  }
  EXPECT_THAT(refused, StatusIs(absl::StatusCode::kUnavailable, HasSubstr("no lock of ")));
  EXPECT_EQ(users.size(), 1023u);
}

TEST_F(HostLedgerDirectoryTest, ADirectoryThatIsNotThereIsAnErrorThatNamesIt) {
  EXPECT_THAT(HostLedger::InDirectory("/no/such/directory"),
              StatusIs(absl::StatusCode::kUnavailable,
                       HasSubstr("open of /no/such/directory/pinion_ledger_")));
}

// --- Files that are not as they should be ---

TEST_F(HostLedgerTest, AFileThatIsTooShortIsMadeLonger) {
  WriteFile("abc");
  const std::shared_ptr<HostLedger> ledger = Open();
  const Reservation reservation = ledger->Reserve(5).value();
  EXPECT_EQ(Open()->reserved_bytes(), 5u);
}

TEST_F(HostLedgerTest, AFileOfRandomBytesHealsItself) {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    shm_unlink(name_.c_str());
    std::mt19937_64 random(seed);
    std::string bytes(64 * 1024, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    WriteFile(bytes);
    const std::shared_ptr<HostLedger> ledger = Open();
    const Reservation reservation = ledger->Reserve(5).value();
    EXPECT_EQ(ledger->reserved_bytes(), 5u);
    EXPECT_EQ(ledger->Reserve(1)->BytesAhead(), 5u);
  }
}

// A damaged size must not make the sum wrap around to little.
TEST_F(HostLedgerTest, HugeReservationsAddUpToMoreThanAnyHostHas) {
  const std::shared_ptr<HostLedger> ledger = Open();
  const Reservation first = ledger->Reserve(UINT64_MAX).value();
  const Reservation second = ledger->Reserve(UINT64_MAX).value();
  EXPECT_GE(ledger->reserved_bytes(), uint64_t{1} << 60);
}

// systemd removes a user's shared memory at logout; processes that start later make a new file.
TEST_F(HostLedgerTest, ARemovedFileIsOpenedAnew) {
  const std::shared_ptr<HostLedger> early = Open();
  const Reservation old = early->Reserve(5).value();
  ASSERT_EQ(shm_unlink(name_.c_str()), 0);
  const std::shared_ptr<HostLedger> late = Open();
  const Reservation reservation = early->Reserve(7).value();
  EXPECT_EQ(late->reserved_bytes(), 7u);
}

// As daemons do. The number of a file that the ledger had open would name another file then.
TEST_F(HostLedgerTest, AProgramMayCloseAllFilesAndOpenOthers) {
  ChildProcess child([&] {
    std::shared_ptr<HostLedger> ledger = Open();
    const std::shared_ptr<HostLedger> other = Open();
    int ends[16];
    close_range(3, UINT_MAX, 0);
    for (int i = 0; i < 16; i += 2) ASSERT_EQ(pipe(ends + i), 0);
    {
      const Reservation reservation = ledger->Reserve(5).value();
      EXPECT_EQ(other->reserved_bytes(), 5u);
    }
    ledger.reset();
    for (const int end : ends) EXPECT_EQ(close(end), 0) << "somebody else has closed it";
  });
  EXPECT_EQ(child.Wait(), 0);
}

TEST_F(HostLedgerTest, AFileThatTakesThePlaceOfStandardInputIsALedgersToo) {
  const std::shared_ptr<HostLedger> other = Open();
  ChildProcess child([&] {
    for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) close(fd);
    errno = EINTR;  // of a call before
    const std::shared_ptr<HostLedger> ledger = Open();
    for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
      EXPECT_EQ(fcntl(fd, F_GETFD), -1) << "the ledger keeps descriptor " << fd;
    }
    const Reservation reservation = ledger->Reserve(5).value();
    EXPECT_EQ(other->reserved_bytes(), 5u);
  });
  EXPECT_EQ(child.Wait(), 0);
}

// Makes /dev/shm the process's own; its user and the mounts of others stay as they are.
bool MayMount() {
  const uid_t user = geteuid();
  const gid_t group = getegid();
  if (unshare(CLONE_NEWNS) != 0) {
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return false;
    std::ofstream("/proc/self/uid_map") << user << " " << user << " 1";
    std::ofstream("/proc/self/setgroups") << "deny";
    std::ofstream("/proc/self/gid_map") << group << " " << group << " 1";
  }
  return geteuid() == user && mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0;
}

// Files of other file systems have the same numbers.
TEST_F(HostLedgerTest, AfterAnotherFileSystemWasMountedItsFileIsOpened) {
  constexpr int kCannotBeTried = 2;
  ChildProcess child([&] {
    const auto mount_another = [] {
      if (mount("pinion_test", "/dev/shm", "tmpfs", 0, nullptr) != 0) _exit(kCannotBeTried);
    };
    if (!MayMount()) _exit(kCannotBeTried);
    mount_another();
    const std::shared_ptr<HostLedger> early = Open();
    struct stat before;
    ASSERT_EQ(stat(("/dev/shm" + name_).c_str(), &before), 0);
    mount_another();
    const std::shared_ptr<HostLedger> late = Open();
    struct stat after;
    ASSERT_EQ(stat(("/dev/shm" + name_).c_str(), &after), 0);
    if (before.st_ino != after.st_ino)
      _exit(kCannotBeTried);  // older kernels number files otherwise
    const Reservation reservation = early->Reserve(7).value();
    EXPECT_EQ(late->reserved_bytes(), 7u);
  });
  const int outcome = child.Wait();
  if (outcome == kCannotBeTried)
    GTEST_SKIP() << "this system lets nobody mount a file system, or numbers its files otherwise";
  EXPECT_EQ(outcome, 0);
}

// As a profiler's timer may. The ledger would be private without anybody noticing.
TEST_F(HostLedgerTest, InterruptedCallsAreMadeAgain) {
  const std::shared_ptr<HostLedger> other = Open();
  interruptions_of_open = 2;
  interruptions_of_fallocate = 2;
  const Reservation reservation = Open()->Reserve(5).value();
  EXPECT_EQ(other->reserved_bytes(), 5u);
  EXPECT_EQ(interruptions_of_open, 0);
  EXPECT_EQ(interruptions_of_fallocate, 0);
}

TEST_F(HostLedgerTest, ANameThatCannotBeOpenedIsAnErrorThatNamesIt) {
  const std::string too_long = "/" + std::string(300, 'x');
  EXPECT_THAT(HostLedger::Open(too_long),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("shm_open of " + too_long)));
}

TEST_F(HostLedgerTest, AFileThatTheSystemGivesNoMemoryForIsAnErrorThatNamesTheCall) {
  const auto refused = [this](const std::string& call) {
    EXPECT_THAT(HostLedger::Open(name_),
                StatusIs(absl::StatusCode::kUnavailable, HasSubstr(call + name_)));
  };
  const std::shared_ptr<HostLedger> opened_before = Open();
  opened_is_closed = true;
  refused("fstat of ");
  EXPECT_THAT(opened_before->Reserve(1), IsOk());
  opened_is_closed = false;
  error_of_fallocate = ENOSPC;
  refused("room for ");
  error_of_fallocate = 0;
  access_of_open = O_WRONLY;
  refused("mmap of ");
  access_of_open = O_RDWR;
}

TEST_F(HostLedgerTest, WithoutSharedMemoryOneLineIsLoggedAndTheProcessReservesForItself) {
  std::vector<std::string> lines;
  LogSink previous =
      SetLogSink([&](LogSeverity, const std::string& message) { lines.push_back(message); });
  const std::shared_ptr<HostLedger> ledger = HostLedger::OpenOrPrivate("/no/such/name");
  SetLogSink(std::move(previous));
  EXPECT_THAT(lines, ElementsAre(HasSubstr("do not know of each other's growth")));
  const Reservation reservation = ledger->Reserve(5).value();
  EXPECT_EQ(ledger->reserved_bytes(), 5u);
}

TEST_F(HostLedgerTest, AFileOfAnotherUserIsNotUsed) {
  WriteFile("");
  if (chown(("/dev/shm" + name_).c_str(), 12345, 12345) != 0) {
    GTEST_SKIP() << "only root can make a file of another user's";
  }
  EXPECT_THAT(HostLedger::Open(name_),
              StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("user 12345")));
}

// The inherited one's lock may be held by a thread that the child does not have.
TEST_F(HostLedgerTest, AChildHasALedgerOfItsOwnThatIsSharedWithItsParent) {
  const std::shared_ptr<HostLedger> parents = HostLedger::OfThisUser();
  const Reservation reservation = parents->Reserve(4321).value();
  ChildProcess child([&] {
    const std::shared_ptr<HostLedger> own = HostLedger::OfThisUser();
    EXPECT_NE(own, parents);
    EXPECT_EQ(own, HostLedger::OfThisUser());
    EXPECT_GE(own->reserved_bytes(), 4321u);
  });
  EXPECT_EQ(child.Wait(), 0);
}

TEST_F(HostLedgerTest, ThisUsersLedgerIsOneObject) {
  EXPECT_EQ(HostLedger::OfThisUser(), HostLedger::OfThisUser());
  EXPECT_THAT(HostLedger::OfThisUser()->Reserve(1), IsOk());
}

}  // namespace
}  // namespace pinion
