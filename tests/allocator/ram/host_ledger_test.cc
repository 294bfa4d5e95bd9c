// With the fortified header, open is an inline function that nobody can replace.
#undef _FORTIFY_SOURCE

#include "pinion/allocator/ram/host_ledger.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <iterator>
#include <latch>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/deadline.h"
#include "pinion/tests/support/captured_log.h"
#include "pinion/tests/support/child_process.h"
#include "pinion/tests/support/fake_host.h"
#include "pinion/tests/support/run_threads.h"
#include "pinion/tests/support/status_matchers.h"
#include "pinion/tests/support/status_says.h"

// The C library's functions, which fail or let others be faster when a test says so.
namespace {
int interruptions_of_open = 0;
int error_of_open = 0;
int error_of_lock = 0;
int error_of_query = 0;
int queries_before_error = 0;
std::string shared_memory;             // the directory that stands for /dev/shm
std::function<void()> before_lock;     // called once, before a reservation's range is locked
std::function<void()> after_any_lock;  // called after each attempt to lock
}  // namespace

extern "C" int open(const char* path, int flags, ...) {
  std::va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & (O_CREAT | __O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  if (interruptions_of_open > 0) {
    --interruptions_of_open;
    errno = EINTR;
    return -1;
  }
  if (error_of_open != 0) {
    errno = error_of_open;
    return -1;
  }
  std::string real_path = path;
  if (real_path.starts_with("/dev/shm/pinion_")) {  // a sandbox may lie there
    real_path = shared_memory + real_path.substr(std::string_view("/dev/shm").size());
  }
  return static_cast<int>(syscall(SYS_openat, AT_FDCWD, real_path.c_str(), flags, mode));
}

extern "C" int fcntl(int fd, int command, ...) {
  std::va_list arguments;
  va_start(arguments, command);
  void* const argument = va_arg(arguments, void*);
  va_end(arguments);
  if (command == F_OFD_GETLK && error_of_query != 0 && queries_before_error-- <= 0) {
    errno = error_of_query;
    return -1;
  }
  const auto* const lock = static_cast<const struct flock*>(argument);
  const bool locks = command == F_OFD_SETLK && lock->l_type == F_WRLCK;
  if (locks && lock->l_start != 0 && before_lock) std::exchange(before_lock, {})();
  if (locks && error_of_lock != 0) {
    errno = error_of_lock;
    return -1;
  }
  const int result = static_cast<int>(syscall(SYS_fcntl, fd, command, argument));
  const int error = errno;
  if (locks && after_any_lock) after_any_lock();
  errno = error;
  return result;
}

namespace pinion {
namespace {

using ::pinion::testing::CapturedLog;
using ::pinion::testing::ChildProcess;
using ::pinion::testing::FakeHost;
using ::pinion::testing::Gate;
using ::pinion::testing::IsUnavailable;
using ::pinion::testing::RunThreads;
using ::pinion::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

using Reservation = HostLedger::Reservation;

class HostLedgerTest : public ::testing::Test {
 protected:
  HostLedger Open() const { return HostLedger::InDirectory(directory()).value(); }

  std::string directory() const { return files_.root().string(); }
  std::filesystem::path file() const {
    return std::filesystem::directory_iterator(files_.root())->path();
  }

  static auto OpenFiles() {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
  }

  // Locks bytes as another process does. Returns a descriptor that keeps the lock.
  int LockBytes(off_t begin, off_t length) const {
    const int fd = open(file().c_str(), O_RDWR);
    struct flock lock = {};
    lock.l_type = F_WRLCK;
    lock.l_start = begin;
    lock.l_len = length;
    EXPECT_EQ(fcntl(fd, F_OFD_SETLK, &lock), 0);
    return fd;
  }

  const FakeHost files_;
  const HostLedger ledger_ = Open();
};

TEST_F(HostLedgerTest, AReservationCountsUntilItEnds) {
  std::optional<Reservation> first = ledger_.Reserve(1);
  const Reservation second = ledger_.Reserve(7);
  EXPECT_EQ(ledger_.reserved_bytes(), 8u);
  first.reset();
  EXPECT_EQ(ledger_.reserved_bytes(), 7u);
}

TEST_F(HostLedgerTest, AMovedReservationEndsOnce) {
  const Reservation earlier = ledger_.Reserve(3);
  const auto before = OpenFiles();
  {
    Reservation first = ledger_.Reserve(5);
    const Reservation second = std::move(first);
    EXPECT_EQ(ledger_.reserved_bytes(), 8u);
    EXPECT_EQ(second.BytesAhead(), 3u);
    EXPECT_EQ(first.BytesAhead(), 0u);  // NOLINT: it was moved from
  }
  EXPECT_EQ(ledger_.reserved_bytes(), 3u);
  EXPECT_EQ(OpenFiles(), before);
}

// Two that came at once and counted each other would both be refused.
TEST_F(HostLedgerTest, OnlyEarlierReservationsAreAhead) {
  const Reservation first = ledger_.Reserve(1);
  std::optional<Reservation> second = ledger_.Reserve(10);
  const Reservation third = ledger_.Reserve(100);
  EXPECT_EQ(first.BytesAhead(), 0u);
  EXPECT_EQ(second->BytesAhead(), 1u);
  EXPECT_EQ(third.BytesAhead(), 11u);
  second.reset();
  EXPECT_EQ(third.BytesAhead(), 1u);
  const Reservation fourth = ledger_.Reserve(3);  // would fit between the first and the third
  EXPECT_EQ(fourth.BytesAhead(), 101u);
  EXPECT_EQ(third.BytesAhead(), 1u);
}

TEST_F(HostLedgerTest, OneDirectoryIsOneLedger) {
  const Reservation reservation = ledger_.Reserve(5);
  EXPECT_EQ(Open().reserved_bytes(), 5u);
  const FakeHost other;
  EXPECT_EQ(HostLedger::InDirectory(other.root().string())->reserved_bytes(), 0u);
}

TEST_F(HostLedgerTest, ALedgerOfNothingRecordsNothing) {
  const auto before = OpenFiles();
  {
    const HostLedger none;
    const Reservation first = none.Reserve(5);
    EXPECT_EQ(none.Reserve(5).BytesAhead(), 0u);
    EXPECT_EQ(none.reserved_bytes(), 0u);
  }
  EXPECT_EQ(OpenFiles(), before);
}

TEST_F(HostLedgerTest, AFileIsOpenWhileItIsReservedAloneAndEmptyAndOfThisUserAlone) {
  const auto before = OpenFiles();
  {
    const Reservation reservation = ledger_.Reserve(5);
    EXPECT_EQ(ledger_.reserved_bytes(), 5u);
    EXPECT_EQ(OpenFiles(), before + 1);
    struct stat info;
    ASSERT_EQ(stat(file().c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777u, 0600u);
    EXPECT_EQ(info.st_size, 0);
  }
  EXPECT_EQ(OpenFiles(), before);
}

TEST_F(HostLedgerTest, AReservationOutlivesItsLedger) {
  std::optional<Reservation> reservation = Open().Reserve(5);
  EXPECT_EQ(ledger_.reserved_bytes(), 5u);
  reservation.reset();
  EXPECT_EQ(ledger_.reserved_bytes(), 0u);
}

TEST_F(HostLedgerTest, AReservationOfNothingIsOfOneByte) {
  const Reservation reservation = ledger_.Reserve(0);
  EXPECT_EQ(ledger_.reserved_bytes(), 1u);
}

TEST_F(HostLedgerTest, ReservationsOfMoreThanAnyHostHasAddUpToSoMuch) {
  constexpr uint64_t kMostBytes = uint64_t{1} << 60;
  ChildProcess child([&] {
    const CapturedLog log;
    std::vector<Reservation> held;
    for (int i = 0; i < 7; ++i) held.push_back(ledger_.Reserve(UINT64_MAX));
    held.push_back(ledger_.Reserve(kMostBytes - 2));  // up to the end of the file
    EXPECT_EQ(log.text(), "");
    EXPECT_EQ(held.back().BytesAhead(), kMostBytes);
    EXPECT_EQ(ledger_.reserved_bytes(), kMostBytes);
    EXPECT_EQ(ledger_.Reserve(1).BytesAhead(), 0u);
    EXPECT_THAT(log.text(), HasSubstr("has no range left"));
    EXPECT_THAT(HostLedger::InDirectory(directory()), IsUnavailable());
  });
  EXPECT_EQ(child.Wait(), 0);
}

// No reservation is, but another program's lock may be.
TEST_F(HostLedgerTest, ALockWithoutAnEndHangsNobody) {
  const int fd = LockBytes(3, 0);
  EXPECT_EQ(ledger_.reserved_bytes(), uint64_t{1} << 60);
  EXPECT_THAT(HostLedger::InDirectory(directory()), IsUnavailable("has no range left"));
  close(fd);
}

TEST_F(HostLedgerTest, TheLedgerOfThisUserIsInSharedMemory) {
  shared_memory = directory();
  const Reservation reservation = HostLedger::OfThisUser().Reserve(4321);
  EXPECT_EQ(ledger_.reserved_bytes(), 4321u);
}

// --- At once ---

// Whoever comes last counts all others: otherwise they would pass a watermark together.
TEST_F(HostLedgerTest, OfThreadsThatReserveAtOnceTheLastCountsAll) {
  constexpr int kThreads = 4;
  for (int round = 0; round < 200; ++round) {
    std::vector<std::optional<Reservation>> held(kThreads);
    std::vector<uint64_t> ahead(kThreads);
    RunThreads(kThreads, [&](int thread) {
      held[thread].emplace(ledger_.Reserve(1));
      ahead[thread] = held[thread]->BytesAhead();
    });
    ASSERT_EQ(*std::max_element(ahead.begin(), ahead.end()), kThreads - 1u);
  }
}

thread_local bool is_second = false;

// Two that do not wait would both be refused. The first one has looked for its place when an
// earlier reservation ends, and the second one comes.
TEST_F(HostLedgerTest, OfTwoReservationsThatComeAtOnceOneCountsTheOther) {
  std::optional<Reservation> ended = ledger_.Reserve(100);
  std::optional<Reservation> second;
  std::thread thread;
  std::latch second_has_tried(1);
  std::latch first_has_counted(1);
  after_any_lock = [&] {
    if (!std::exchange(is_second, false)) return;
    second_has_tried.count_down();
    first_has_counted.wait();
  };
  before_lock = [&] {
    ended.reset();
    thread = std::thread([&] {
      is_second = true;
      second.emplace(ledger_.Reserve(5));
    });
    second_has_tried.wait();
  };
  const Reservation first = ledger_.Reserve(7);
  EXPECT_EQ(first.BytesAhead(), 0u);
  first_has_counted.count_down();
  thread.join();
  after_any_lock = nullptr;
  EXPECT_EQ(second->BytesAhead(), 7u);
}

// It has the first byte. A reservation waits for the time of many placements and goes on.
TEST_F(HostLedgerTest, AProcessThatIsStoppedWhileItChoosesItsPlaceHoldsUpNobody) {
  const Reservation earlier = ledger_.Reserve(3);
  const int fd = LockBytes(0, 1);
  EXPECT_EQ(ledger_.reserved_bytes(), 3u);
  const internal::Stopwatch stopwatch;
  const Reservation first = ledger_.Reserve(5);
  EXPECT_GE(stopwatch.Elapsed(), absl::Milliseconds(10));
  EXPECT_EQ(ledger_.Reserve(7).BytesAhead(), 8u);
  EXPECT_EQ(first.BytesAhead(), 3u);
  close(fd);
}

// In these, the faster ones did not get the placement lock in time.
TEST_F(HostLedgerTest, AReservationWhosePlaceWasTakenMeanwhileCountsWhoHasIt) {
  std::optional<Reservation> faster;
  before_lock = [&] { faster.emplace(ledger_.Reserve(5)); };
  EXPECT_EQ(ledger_.Reserve(7).BytesAhead(), 5u);
}

// The one behind it has not counted it: it has looked before.
TEST_F(HostLedgerTest, AReservationBehindWhichAnotherOneWasFasterCountsThatOne) {
  std::optional<Reservation> faster;
  before_lock = [&] {
    const Reservation ended = ledger_.Reserve(100);
    faster.emplace(ledger_.Reserve(5));  // behind it
  };
  const Reservation reservation = ledger_.Reserve(7);
  EXPECT_EQ(reservation.BytesAhead(), 5u);
  EXPECT_EQ(ledger_.reserved_bytes(), 12u);
}

// --- Processes ---

TEST_F(HostLedgerTest, AProcessSeesWhatAnotherReserves) {
  Gate reserved;
  Gate may_end;
  ChildProcess child([&] {
    const Reservation reservation = Open().Reserve(5);
    reserved.Open();
    may_end.Pass();
  });
  reserved.Pass();
  EXPECT_EQ(ledger_.reserved_bytes(), 5u);
  EXPECT_EQ(ledger_.Reserve(1).BytesAhead(), 5u);
  may_end.Open();
  EXPECT_EQ(child.Wait(), 0);
  EXPECT_EQ(ledger_.reserved_bytes(), 0u);
}

TEST_F(HostLedgerTest, AStoppedProcessKeepsItsShareAndHoldsUpNobodyAndAKilledOneReturnsIt) {
  Gate reserved;
  ChildProcess child([&] {
    const Reservation reservation = ledger_.Reserve(5);
    reserved.Open();
    Gate::WaitForEver();
  });
  reserved.Pass();
  ASSERT_EQ(kill(child.pid(), SIGSTOP), 0);
  EXPECT_EQ(ledger_.Reserve(1).BytesAhead(), 5u);
  child.Kill();
  EXPECT_EQ(child.Wait(), -SIGKILL);
  EXPECT_EQ(ledger_.reserved_bytes(), 0u);
}

TEST_F(HostLedgerTest, AChildOfForkNeitherEndsNorKeepsWhatItsParentReserved) {
  std::optional<Reservation> reservation = ledger_.Reserve(5);
  Gate ended;
  Gate may_end;
  ChildProcess child([&] {
    std::optional<Reservation> inherited = std::move(reservation);
    inherited.reset();
    const Reservation own = ledger_.Reserve(7);
    EXPECT_EQ(own.BytesAhead(), 5u);
    ended.Open();
    may_end.Pass();
  });
  ChildProcess idle([&] { Gate::WaitForEver(); });
  ended.Pass();
  EXPECT_EQ(ledger_.reserved_bytes(), 12u);
  reservation.reset();
  EXPECT_EQ(ledger_.reserved_bytes(), 7u);
  may_end.Open();
  EXPECT_EQ(child.Wait(), 0);
}

// There, pids are others: this one is 1.
TEST_F(HostLedgerTest, ProcessesOfSeveralPidNamespacesShareIt) {
  constexpr int kCannotBeTried = 2;
  Gate reserved;
  ChildProcess child([&] {
    if (unshare(CLONE_NEWPID) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWPID) != 0) {
      reserved.Open();
      _exit(kCannotBeTried);
    }
    ChildProcess first_of_namespace([&] {
      prctl(PR_SET_PDEATHSIG, SIGKILL);  // its parent is killed and cannot end it
      EXPECT_EQ(getpid(), 1);
      const Reservation reservation = ledger_.Reserve(5);
      reserved.Open();
      Gate::WaitForEver();
    });
    Gate::WaitForEver();
  });
  reserved.Pass();
  if (ledger_.reserved_bytes() == 0) {
    ASSERT_EQ(child.Wait(), kCannotBeTried);
    GTEST_SKIP() << "this system lets nobody make a pid namespace";
  }
  EXPECT_EQ(ledger_.Reserve(1).BytesAhead(), 5u);
}

// --- Files that are not as they should be ---

// systemd removes a user's shared memory at logout; processes that start later make a new file.
TEST_F(HostLedgerTest, ARemovedFileIsMadeAnew) {
  const Reservation old = ledger_.Reserve(5);
  std::filesystem::remove(file());
  const Reservation reservation = ledger_.Reserve(7);
  EXPECT_EQ(Open().reserved_bytes(), 7u);
}

TEST_F(HostLedgerTest, AFileThatTakesThePlaceOfStandardInputIsALedgersToo) {
  ChildProcess child([&] {
    close(STDIN_FILENO);
    {
      const Reservation reservation = ledger_.Reserve(5);
      EXPECT_EQ(ledger_.reserved_bytes(), 5u);
    }
    EXPECT_EQ(ledger_.reserved_bytes(), 0u);
    EXPECT_EQ(fcntl(STDIN_FILENO, F_GETFD), -1);
  });
  EXPECT_EQ(child.Wait(), 0);
}

// As a profiler's timer may interrupt them.
TEST_F(HostLedgerTest, InterruptedCallsAreMadeAgain) {
  interruptions_of_open = 2;
  const Reservation reservation = ledger_.Reserve(5);
  EXPECT_EQ(interruptions_of_open, 0);
  EXPECT_EQ(ledger_.reserved_bytes(), 5u);
}

TEST_F(HostLedgerTest, ADirectoryThatIsNotThereIsAnErrorThatNamesIt) {
  EXPECT_THAT(HostLedger::InDirectory("/no/such/directory"),
              IsUnavailable("open of /no/such/directory/pinion_ledger_"));
}

TEST_F(HostLedgerTest, AFileSystemThatCannotLockRangesIsAnErrorThatNamesTheFile) {
  const auto is_refused = [this](const std::string& why) {
    EXPECT_THAT(HostLedger::InDirectory(directory()), IsUnavailable(why + file().string()));
  };
  error_of_lock = EINVAL;
  is_refused("fcntl(F_OFD_SETLK) of ");
  error_of_lock = EAGAIN;  // of locks that it does not report
  is_refused("attempts to lock a range of ");
  error_of_lock = 0;
  error_of_query = EINVAL;
  is_refused("fcntl(F_OFD_GETLK) of ");
  error_of_query = 0;
}

TEST_F(HostLedgerTest, AFileOfAnotherUserIsNotUsed) {
  if (chown(file().c_str(), 12345, 12345) != 0) {
    GTEST_SKIP() << "only root can make a file of another user's";
  }
  const auto before = OpenFiles();
  EXPECT_THAT(HostLedger::InDirectory(directory()),
              StatusIs(absl::StatusCode::kPermissionDenied,
                       AllOf(HasSubstr("user 12345"), HasSubstr("set ledger_directory"))));
  EXPECT_EQ(OpenFiles(), before);
}

// In child processes, because whether the log has said so is the process's.
TEST_F(HostLedgerTest, WhereNothingCanBeRecordedThatIsLoggedOnceAndGrowthGoesOn) {
  ChildProcess child([&] {
    const auto before = OpenFiles();
    const CapturedLog log;
    error_of_open = EROFS;
    for (int i = 0; i < 2; ++i) EXPECT_EQ(ledger_.Reserve(5).BytesAhead(), 0u);
    EXPECT_EQ(ledger_.reserved_bytes(), 0u);
    error_of_open = 0;
    EXPECT_THAT(log.text(),
                HasSubstr("other Pinion processes of this host: open of " + directory()));
    EXPECT_EQ(std::count(log.text().begin(), log.text().end(), '\n'), 1);
    EXPECT_EQ(OpenFiles(), before);
  });
  EXPECT_EQ(child.Wait(), 0);
}

TEST_F(HostLedgerTest, LocksThatCannotBeReadAreLoggedOnceAndGrowthGoesOn) {
  std::optional<Reservation> ended = ledger_.Reserve(1);
  const Reservation others = ledger_.Reserve(3);
  ended.reset();
  const auto expect_logged_in_a_child = [](const std::string& text,
                                           const std::function<void()>& body) {
    ChildProcess child([&] {
      const CapturedLog log;
      body();
      EXPECT_THAT(log.text(), HasSubstr(text));
      EXPECT_EQ(std::count(log.text().begin(), log.text().end(), '\n'), 1);
    });
    EXPECT_EQ(child.Wait(), 0);
  };
  expect_logged_in_a_child("fcntl(F_OFD_GETLK)", [this] {
    const Reservation reservation = ledger_.Reserve(5);
    error_of_query = EIO;
    for (int i = 0; i < 2; ++i) EXPECT_EQ(reservation.BytesAhead(), 0u);
    EXPECT_EQ(ledger_.reserved_bytes(), 0u);
  });
  expect_logged_in_a_child("fcntl(F_OFD_GETLK) of " + file().string(), [this] {
    // Three find the place, among them one before the others' lock. One looks behind the place.
    for (int queries = 0; queries < 4; ++queries) {
      error_of_query = EIO;
      queries_before_error = queries;
      const Reservation reservation = ledger_.Reserve(5);
      error_of_query = 0;
      EXPECT_EQ(reservation.BytesAhead(), 0u);
      EXPECT_EQ(ledger_.reserved_bytes(), 3u) << queries;
    }
  });
  expect_logged_in_a_child("fcntl(F_OFD_GETLK)", [this] {
    error_of_query = EIO;
    EXPECT_EQ(ledger_.reserved_bytes(), 0u);
  });
}

}  // namespace
}  // namespace pinion
