#include "pinion/allocator/ram/host_ledger.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <optional>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/allocator/ram/ledger_file.h"

namespace pinion {
namespace {

using internal::LedgerName;

// In the file's name: a program of another layout, or of other rules for the file, uses another.
constexpr int kLayoutVersion = 2;

// The owner has published its bytes and not drawn its turn yet. It is before all turns: everybody
// counts it.
constexpr uint64_t kNoTurnYet = 0;

// An owner in a directory is its turn of joining, times this, plus its place.
constexpr uint64_t kPlaces = internal::kMostMembers + 1;

// Zero bytes are a table without reservations, so a new file needs no initialisation.
struct Slot {
  std::atomic<ProcessIdentity> owner;  // 0: free
  std::atomic<uint64_t> size_bytes;
  std::atomic<uint64_t> turn;
};

struct SharedTable {
  std::atomic<uint64_t> last_turn;
  Slot slots[HostLedger::kMaxReservations];
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);

// More than any host has; sums of a damaged table's words do not wrap around.
constexpr uint64_t kMostBytes = uint64_t{1} << 60;

// The one that OfThisUser returns, as long as somebody has it. A static that owned it would be
// destroyed before others that use it, or stay behind when a library is unloaded (dlclose).
constinit Mutex of_this_user_mu;
HostLedger* of_this_user ABSL_GUARDED_BY(of_this_user_mu) = nullptr;

// A child of fork() that makes an allocator must not find the lock taken by a thread that it does
// not have. Registered while the library is loaded, as in base/check.cc.
[[maybe_unused]] const int held_across_fork =
    pthread_atfork([]() ABSL_NO_THREAD_SAFETY_ANALYSIS { of_this_user_mu.Lock(); },
                   []() ABSL_NO_THREAD_SAFETY_ANALYSIS { of_this_user_mu.Unlock(); },
                   []() ABSL_NO_THREAD_SAFETY_ANALYSIS { of_this_user_mu.Unlock(); });

absl::Status SystemError(const std::string& what) {
  return absl::UnavailableError(absl::StrCat(what, ": ", std::strerror(errno)));
}

}  // namespace

struct HostLedger::Table {
  ~Table() {
    if (is_private) {
      delete shared;
    } else {
      munmap(shared, sizeof(SharedTable));
      // The program may have closed all files. A child of fork() has none of its parent's.
      if (const int fd = file->get(); fd >= 0) internal::RemoveIfUnused(fd, name);
    }
  }

  bool IsOf(const struct stat& file) const { return device == file.st_dev && inode == file.st_ino; }

  // False if somebody else did first.
  bool Claim(int slot, ProcessIdentity expected, ProcessIdentity owner) {
    return shared->slots[slot].owner.compare_exchange_strong(expected, owner);
  }

  // Who owns what is reserved here. In a directory, which several pid namespaces may share: a
  // member of the file, and a number that tells it from those that were that member before.
  ProcessIdentity Self() const { return name.in_directory ? member : OwnProcess(); }

  // In a child of fork() this may be the parent's, which the child speaks for nowhere.
  bool IsOwnedBy(ProcessIdentity owner) const {
    return owner == Self() && !(name.in_directory && origin.InForkedChild());
  }

  // Takes a member's place, and voids what whoever had it before has left. False if there is none.
  bool Join() {
    const uint64_t place = internal::LockMember(file->get());
    if (place == 0) return false;
    for (Slot& slot : shared->slots) {
      ProcessIdentity left = slot.owner;
      if (left % kPlaces == place && left != 0) slot.owner.compare_exchange_strong(left, 0);
    }
    member = ++shared->last_turn * kPlaces + place;
    return true;
  }

  // Whether the reservations of `holder` are void. A private table in a child of fork() is a copy
  // that its parent no longer writes to.
  bool IsGone(ProcessIdentity holder) const {
    if (holder == Self()) return false;
    if (!name.in_directory) return is_private || !IsRunning(holder);
    const int fd = file->get();
    return fd >= 0 && !internal::MemberIsLocked(fd, holder % kPlaces);
  }

  // A free slot, or else one that a dead process has left. -1 if there is none.
  int ClaimAny(ProcessIdentity owner) {
    for (int i = 0; i < kMaxReservations; ++i) {
      if (Claim(i, 0, owner)) return i;
    }
    for (int i = 0; i < kMaxReservations; ++i) {
      const ProcessIdentity holder = shared->slots[i].owner;
      if (IsGone(holder) && Claim(i, holder, owner)) return i;
    }
    return -1;
  }

  // Bytes of running owners whose turn is before `turn`.
  uint64_t BytesBefore(uint64_t turn) {
    uint64_t bytes = 0;
    for (int i = 0; i < kMaxReservations; ++i) {
      Slot& slot = shared->slots[i];
      const ProcessIdentity holder = slot.owner;
      if (holder == 0) continue;
      if (IsGone(holder)) {
        (void)Claim(i, holder, 0);  // so that nobody needs to look at it again
        continue;
      }
      if (slot.turn >= turn) continue;
      bytes = std::min(kMostBytes, bytes + std::min<uint64_t>(kMostBytes, slot.size_bytes));
    }
    return bytes;
  }

  SharedTable* shared = nullptr;
  bool is_private = true;  // in this process's own memory
  const ForkOrigin origin;
  // Of the file, which is kept open for the locks.
  LedgerName name;
  std::optional<internal::UninheritedFd> file;
  ProcessIdentity member = 0;  // in a directory
  dev_t device = 0;
  ino_t inode = 0;
};

uint64_t HostLedger::Reservation::BytesAhead() const {
  PINION_CHECK(table_ != nullptr) << "BytesAhead of a reservation that was moved from or committed";
  return table_->BytesBefore(turn_);
}

void HostLedger::Reservation::Release() {
  if (table_ == nullptr) return;
  // In a child of fork() this is a copy of the parent's.
  if (table_->IsOwnedBy(owner_)) (void)table_->Claim(slot_, owner_, 0);
  table_ = nullptr;
}

std::shared_ptr<HostLedger> HostLedger::OfThisUser() {
  // Whoever is the last to let go of one may not have entered the destructor yet. In a child of
  // fork(), a thread of the parent's may hold the lock of the inherited one for ever.
  const auto in_use = []() ABSL_EXCLUSIVE_LOCKS_REQUIRED(of_this_user_mu) {
    const bool none = of_this_user == nullptr || of_this_user->origin_.InForkedChild();
    return none ? nullptr : of_this_user->weak_from_this().lock();
  };
  {
    MutexLock lock(of_this_user_mu);
    if (std::shared_ptr<HostLedger> ledger = in_use()) return ledger;
  }
  const std::string prefix =
      absl::StrCat("/pinion_ledger_", kLayoutVersion, "_uid", geteuid(), "_pidns");
  std::shared_ptr<HostLedger> opened = OpenOrPrivate(absl::StrCat(prefix, PidNamespace()));
  internal::RemoveUnusedFiles(prefix);
  MutexLock lock(of_this_user_mu);
  if (std::shared_ptr<HostLedger> ledger = in_use()) return ledger;  // another thread was faster
  of_this_user = opened.get();
  return opened;
}

HostLedger::~HostLedger() {
  MutexLock lock(of_this_user_mu);
  if (of_this_user == this) of_this_user = nullptr;
}

std::shared_ptr<HostLedger> HostLedger::OpenOrPrivate(const std::string& name) {
  absl::StatusOr<std::shared_ptr<HostLedger>> ledger = Open(name);
  if (ledger.ok()) return *std::move(ledger);
  PINION_LOG(kWarning) << "Pinion processes on this host do not know of each other's growth: "
                       << ledger.status().message();
  return Private();
}

absl::StatusOr<std::shared_ptr<HostLedger>> HostLedger::Open(const std::string& name) {
  if (name.size() < 2 || name.rfind('/') != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("the name of the ledger is \"", name,
                     "\": shm_open takes a slash and a name without one, "
                     "/pinion for example"));
  }
  PINION_ASSIGN_OR_RETURN(std::shared_ptr<Table> table, Map({name}, /*current=*/nullptr));
  return std::shared_ptr<HostLedger>(new HostLedger(std::move(table)));
}

absl::StatusOr<std::shared_ptr<HostLedger>> HostLedger::InDirectory(const std::string& directory) {
  if (directory.empty()) {
    return absl::InvalidArgumentError(
        "the directory of the ledger is \"\": name one that all processes can write to, "
        "/run/pinion for example");
  }
  const std::string path =
      absl::StrCat(directory, "/pinion_ledger_", kLayoutVersion, "_uid", geteuid());
  PINION_ASSIGN_OR_RETURN(std::shared_ptr<Table> table,
                          Map({path, /*in_directory=*/true}, /*current=*/nullptr));
  return std::shared_ptr<HostLedger>(new HostLedger(std::move(table)));
}

std::shared_ptr<HostLedger> HostLedger::Private() {
  auto table = std::make_shared<Table>();
  table->shared = new SharedTable();
  return std::shared_ptr<HostLedger>(new HostLedger(std::move(table)));
}

absl::StatusOr<std::shared_ptr<HostLedger::Table>> HostLedger::Map(const LedgerName& name,
                                                                   std::shared_ptr<Table> current) {
  const int fd = name.Open(O_RDWR | O_CREAT);
  if (fd < 0) return SystemError(absl::StrCat(name.call(), " of ", name.name));
  const absl::Cleanup close_fd = [fd] { close(fd); };
  struct stat info;
  if (fstat(fd, &info) != 0) return SystemError(absl::StrCat("fstat of ", name.name));
  if (info.st_uid != geteuid()) {
    return absl::PermissionDeniedError(absl::StrCat(name.name, " belongs to user ", info.st_uid));
  }
  if (current != nullptr && current->IsOf(info)) return current;
  if (!internal::LockAsUser(fd)) return Map(name, std::move(current));
  // To touch a page that a full file system does not have would be a SIGBUS later on.
  do {
    errno = posix_fallocate(fd, 0, sizeof(SharedTable));
  } while (errno == EINTR);
  if (errno != 0) return SystemError(absl::StrCat("room for ", name.name));
  // Opened a second time: a mapping, which children of fork() have too, keeps the locks of the
  // description that it was made from.
  const int mapped_fd = name.Open(O_RDWR);
  const absl::Cleanup close_mapped_fd = [mapped_fd] { close(mapped_fd); };
  struct stat mapped_info;
  if (mapped_fd < 0 || fstat(mapped_fd, &mapped_info) != 0) {
    return SystemError(absl::StrCat(name.call(), " of ", name.name));
  }
  if (!internal::IsSameFile(info, mapped_info)) return Map(name, std::move(current));
  void* data = mmap(nullptr, sizeof(SharedTable), PROT_READ | PROT_WRITE, MAP_SHARED, mapped_fd, 0);
  if (data == MAP_FAILED) return SystemError(absl::StrCat("mmap of ", name.name));
  auto table = std::make_shared<Table>();
  table->shared = static_cast<SharedTable*>(data);
  table->is_private = false;
  table->device = info.st_dev;
  table->inode = info.st_ino;
  table->name = name;
  // Not in the place of standard input, which a program may close and open as it likes.
  table->file.emplace(fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1));
  if (name.in_directory && !table->Join()) {
    return absl::UnavailableError(
        absl::StrCat("no lock of ", name.name, " is left: at most ", internal::kMostMembers,
                     " users, on a file system that has open file description locks"));
  }
  return table;
}

// systemd removes a user's files in /dev/shm when the last session ends (RemoveIPC).
std::shared_ptr<HostLedger::Table> HostLedger::CurrentTable() {
  std::shared_ptr<Table> table;
  {
    MutexLock lock(mu_);
    table = table_;
  }
  if (table->is_private) return table;
  // In a directory, the locks may be lost: the program has closed all files, or this is a child.
  const bool lost = table->name.in_directory && table->file->get() < 0;
  absl::StatusOr<std::shared_ptr<Table>> mapped = Map(table->name, lost ? nullptr : table);
  if (!mapped.ok() || *mapped == table) return table;
  MutexLock lock(mu_);
  // Another thread may have found the new file first, or one that is newer still. `table` outlives
  // the lock: a table that nobody else has is unmapped when it goes.
  if (table_ == table) table_ = *std::move(mapped);
  return table_;
}

absl::StatusOr<HostLedger::Reservation> HostLedger::Reserve(uint64_t size_bytes) {
  std::shared_ptr<Table> table = CurrentTable();
  const ProcessIdentity owner = table->Self();
  const int index = table->ClaimAny(owner);
  if (index < 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("all ", kMaxReservations,
                     " reservations of the host's RAM are taken: too many growths at once"));
  }
  Slot& slot = table->shared->slots[index];
  // The bytes are there before the turn is drawn: whoever draws a later one sees them.
  slot.turn = kNoTurnYet;
  slot.size_bytes = size_bytes;
  const uint64_t turn = ++table->shared->last_turn;
  slot.turn = turn;
  return Reservation(std::move(table), index, turn, owner);
}

uint64_t HostLedger::reserved_bytes() const {
  std::shared_ptr<Table> table;
  {
    MutexLock lock(mu_);
    table = table_;
  }
  return table->BytesBefore(UINT64_MAX);
}

}  // namespace pinion
