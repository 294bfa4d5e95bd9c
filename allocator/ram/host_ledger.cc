#include "pinion/allocator/ram/host_ledger.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <limits>
#include <optional>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"

namespace pinion {
namespace {

// Part of the file's name. Versions of Pinion with another kind of ledger use other files.
constexpr int kFormatVersion = 3;

constexpr uint64_t kMostBytes = uint64_t{1} << 60;  // more than any host has
constexpr int kMostAttempts = 1000;                 // many more than concurrent growths need
constexpr off_t kFirstByte = 1;                     // of reservations; byte 0 is the placement lock
constexpr off_t kEndOfFile = std::numeric_limits<off_t>::max();

constexpr int kMostPlacementTries = 100;
constexpr absl::Duration kNextPlacementTry = absl::Microseconds(100);  // a placement takes 10 us

std::string PathIn(const std::string& directory) {
  return absl::StrCat(directory, "/pinion_ledger_", kFormatVersion, "_uid", geteuid());
}

absl::Status SystemError(const char* call, const std::string& path) {
  return absl::UnavailableError(absl::StrCat(call, " of ", path, ": ", std::strerror(errno)));
}

absl::StatusOr<int> OpenFile(const std::string& path) {
  const int fd = TEMP_FAILURE_RETRY(
      open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, S_IRUSR | S_IWUSR));
  if (fd < 0) return SystemError("open", path);
  struct stat info = {};
  fstat(fd, &info);
  if (info.st_uid == geteuid()) return fd;
  close(fd);
  return absl::PermissionDeniedError(
      absl::StrCat(path, " belongs to user ", info.st_uid,
                   ": remove the file, or set ledger_directory to a directory of this user"));
}

// For locks of open file descriptions. They exclude each other within a process too, and end when
// the last copy of their descriptor is closed.
struct flock LockOf(int16_t type, off_t begin, off_t end) {
  struct flock lock = {};
  lock.l_type = type;
  lock.l_start = begin;
  lock.l_len = end - begin;
  return lock;
}

bool SetLock(int fd, int16_t type, off_t begin, off_t end) {
  struct flock lock = LockOf(type, begin, end);
  return fcntl(fd, F_OFD_SETLK, &lock) == 0;
}

// Reservations work without the placement lock as well. Where no lock can be set, they fail.
void TakePlacementLock(int fd) {
  for (int tries = 0; tries < kMostPlacementTries; ++tries) {
    if (SetLock(fd, F_WRLCK, 0, kFirstByte) || errno != EAGAIN) return;
    absl::SleepFor(kNextPlacementTry);
  }
}

// Visits all ranges in [begin, end) that other descriptors lock during the whole call. The kernel
// reports one of them at a time. Returns whether it does. Errors are in errno.
bool VisitLocks(int fd, off_t begin, off_t end, absl::FunctionRef<void(off_t, off_t)> visit) {
  while (begin < end) {
    struct flock found = LockOf(F_WRLCK, begin, end);
    if (fcntl(fd, F_OFD_GETLK, &found) != 0) return false;
    if (found.l_type == F_UNLCK) return true;
    const off_t found_end = found.l_len == 0 ? kEndOfFile : found.l_start + found.l_len;
    visit(found.l_start, found_end);
    if (!VisitLocks(fd, begin, found.l_start, visit)) return false;
    begin = found_end;
  }
  return true;
}

// Returns nothing if the locks cannot be read. Errors are in errno.
std::optional<uint64_t> LockedBytes(int fd, off_t begin, off_t end) {
  uint64_t bytes = 0;
  if (!VisitLocks(fd, begin, end, [&](off_t first, off_t last) { bytes += last - first; })) {
    return std::nullopt;
  }
  return std::min(bytes, kMostBytes);
}

void WarnOnce(absl::string_view why) {
  static std::atomic<bool> is_logged = false;
  if (is_logged.exchange(true)) return;
  PINION_LOG(kWarning) << "growth is not coordinated with other Pinion processes of this host: "
                       << why;
}

uint64_t LockedBytesOrWarn(int fd, off_t begin, off_t end) {
  const std::optional<uint64_t> bytes = LockedBytes(fd, begin, end);
  if (!bytes.has_value()) WarnOnce(absl::StrCat("fcntl(F_OFD_GETLK): ", std::strerror(errno)));
  return bytes.value_or(0);
}

}  // namespace

HostLedger::Reservation::~Reservation() {
  if (fd_ < 0) return;
  // Closing is not enough, because children of fork() may have the descriptor. A child must not
  // unlock its parent's range.
  if (!origin_.InForkedChild()) SetLock(fd_, F_UNLCK, 0, kEndOfFile);
  close(fd_);
}

uint64_t HostLedger::Reservation::BytesAhead() const {
  return fd_ < 0 ? 0 : LockedBytesOrWarn(fd_, kFirstByte, begin_);
}

HostLedger HostLedger::OfThisUser() { return HostLedger(PathIn("/dev/shm")); }

absl::StatusOr<HostLedger> HostLedger::InDirectory(const std::string& directory) {
  if (directory.empty()) {
    return absl::InvalidArgumentError(
        "the directory of the ledger is \"\": name one that all processes can write to, "
        "/run/pinion for example");
  }
  HostLedger ledger(PathIn(directory));
  PINION_RETURN_IF_ERROR(ledger.TryReserve(1).status());
  return ledger;
}

HostLedger::Reservation HostLedger::Reserve(uint64_t size_bytes) const {
  if (path_.empty()) return Reservation(-1);
  absl::StatusOr<Reservation> reservation = TryReserve(size_bytes);
  if (reservation.ok()) return *std::move(reservation);
  WarnOnce(reservation.status().message());
  return Reservation(-1);
}

// A reservation is placed behind all others, so that earlier ones are in front. Without the
// placement lock, another reservation may be placed further behind between search and lock, and not
// count this one. So a reservation with another one behind it is placed anew.
absl::StatusOr<HostLedger::Reservation> HostLedger::TryReserve(uint64_t size_bytes) const {
  PINION_ASSIGN_OR_RETURN(const int fd, OpenFile(path_));
  Reservation reservation(fd);
  const auto length = static_cast<off_t>(std::clamp(size_bytes, uint64_t{1}, kMostBytes));
  TakePlacementLock(fd);
  for (int attempts = 0; attempts < kMostAttempts; ++attempts) {
    off_t begin = kFirstByte;
    const auto place_behind = [&](off_t, off_t end) { begin = std::max(begin, end); };
    if (!VisitLocks(fd, kFirstByte, kEndOfFile, place_behind)) {
      return SystemError("fcntl(F_OFD_GETLK)", path_);
    }
    if (begin > kEndOfFile - length) {
      return absl::UnavailableError(absl::StrCat(path_, " has no range left to lock"));
    }
    const off_t end = begin + length;
    if (!SetLock(fd, F_WRLCK, begin, end)) {
      if (errno == EAGAIN) continue;  // another reservation was faster
      return SystemError("fcntl(F_OFD_SETLK)", path_);
    }
    const std::optional<uint64_t> bytes_behind = LockedBytes(fd, end, kEndOfFile);
    if (!bytes_behind.has_value()) return SystemError("fcntl(F_OFD_GETLK)", path_);
    if (*bytes_behind == 0) {
      SetLock(fd, F_UNLCK, 0, kFirstByte);
      reservation.begin_ = begin;
      return reservation;
    }
    SetLock(fd, F_UNLCK, begin, end);
  }
  return absl::UnavailableError(absl::StrCat("in ", kMostAttempts, " attempts to lock a range of ",
                                             path_, ", others always were faster"));
}

uint64_t HostLedger::reserved_bytes() const {
  const absl::StatusOr<int> fd = OpenFile(path_);
  if (!fd.ok()) return 0;
  const uint64_t bytes = LockedBytesOrWarn(*fd, kFirstByte, kEndOfFile);
  close(*fd);
  return bytes;
}

}  // namespace pinion
