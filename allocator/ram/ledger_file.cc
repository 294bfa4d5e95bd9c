#include "pinion/allocator/ram/ledger_file.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "pinion/allocator/base/mutex.h"

namespace pinion::internal {
namespace {

// How often to look whether whoever is about to remove a file has done so, a millisecond apart.
constexpr int kLooksAtARemoval = 100;

// Behind the end of any table: locks need no bytes.
constexpr off_t kFirstMemberByte = off_t{1} << 32;

struct flock MemberLock(uint64_t member) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = kFirstMemberByte + static_cast<off_t>(member);
  lock.l_len = 1;
  return lock;
}

constinit Mutex uninherited_mu;
UninheritedFd* first_uninherited ABSL_GUARDED_BY(uninherited_mu) = nullptr;

}  // namespace

int LedgerName::Open(int flags) const {
  int fd;
  do {
    fd = in_directory ? open(name.c_str(), flags | O_CLOEXEC | O_NOFOLLOW, S_IRUSR | S_IWUSR)
                      : shm_open(name.c_str(), flags, S_IRUSR | S_IWUSR);
  } while (fd < 0 && errno == EINTR);
  return fd;
}

void LedgerName::Remove() const {
  if (in_directory) {
    unlink(name.c_str());
  } else {
    shm_unlink(name.c_str());
  }
}

bool IsSameFile(const struct stat& a, const struct stat& b) {
  return a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

bool LockAsUser(int fd) {
  for (int look = 0; look < kLooksAtARemoval; ++look) {
    if (flock(fd, LOCK_SH | LOCK_NB) == 0 || errno != EWOULDBLOCK) break;
    absl::SleepFor(absl::Milliseconds(1));
  }
  struct stat info;
  return fstat(fd, &info) != 0 || info.st_nlink > 0;
}

void RemoveIfUnused(int fd, const LedgerName& name) {
  if (flock(fd, LOCK_EX | LOCK_NB) != 0) return;
  const int named = name.Open(O_RDONLY);
  if (named < 0) return;
  struct stat locked;
  struct stat found;
  if (fstat(fd, &locked) == 0 && fstat(named, &found) == 0 && IsSameFile(locked, found)) {
    name.Remove();
  }
  close(named);
}

void RemoveUnusedFiles(const std::string& prefix) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm", error)) {
    const LedgerName name = {absl::StrCat("/", entry.path().filename().string())};
    if (!absl::StartsWith(name.name, prefix)) continue;
    const int fd = name.Open(O_RDONLY);
    if (fd < 0) continue;
    RemoveIfUnused(fd, name);
    close(fd);
  }
}

uint64_t LockMember(int fd) {
  for (uint64_t member = 1; member <= kMostMembers; ++member) {
    struct flock lock = MemberLock(member);
    if (fcntl(fd, F_OFD_SETLK, &lock) == 0) return member;
  }
  return 0;
}

bool MemberIsLocked(int fd, uint64_t member) {
  struct flock lock = MemberLock(member);
  return fcntl(fd, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

UninheritedFd::UninheritedFd(int fd) : fd_(fd) {
  if (fstat(fd, &file_) != 0) fd_ = -1;
  MutexLock lock(uninherited_mu);
  next_ = first_uninherited;
  if (next_ != nullptr) next_->before_ = this;
  first_uninherited = this;
}

UninheritedFd::~UninheritedFd() {
  {
    MutexLock lock(uninherited_mu);
    if (next_ != nullptr) next_->before_ = before_;
    (before_ != nullptr ? before_->next_ : first_uninherited) = next_;
  }
  if (const int fd = get(); fd >= 0) close(fd);
}

int UninheritedFd::get() const {
  const int fd = fd_;
  struct stat now;
  if (fd >= 0 && fstat(fd, &now) == 0 && IsSameFile(now, file_)) return fd;
  fd_ = -1;  // whoever opens the file again may get the same number
  return -1;
}

void UninheritedFd::CloseAllInChild() ABSL_NO_THREAD_SAFETY_ANALYSIS {
  for (UninheritedFd* file = first_uninherited; file != nullptr; file = file->next_) {
    if (const int fd = file->get(); fd >= 0) close(fd);
    file->fd_ = -1;
  }
  uninherited_mu.Unlock();
}

namespace {
// Registered while the library is loaded, as in base/check.cc.
[[maybe_unused]] const int closed_in_child =
    pthread_atfork([]() ABSL_NO_THREAD_SAFETY_ANALYSIS { uninherited_mu.Lock(); },
                   []() ABSL_NO_THREAD_SAFETY_ANALYSIS { uninherited_mu.Unlock(); },
                   UninheritedFd::CloseAllInChild);
}  // namespace

}  // namespace pinion::internal
