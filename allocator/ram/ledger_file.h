// The file of a host ledger: who uses it, who of its users lives, and who removes it.
//
//   int fd = name.Open(O_RDWR | O_CREAT);
//   if (!LockAsUser(fd)) ...                       // it is being removed: open it anew
//   const int member = LockMember(fd);             // until this process ends, or closes fd
//   MemberIsLocked(fd, member)                     // in any other process, of any pid namespace
//   RemoveIfUnused(fd, name);                      // before close(fd), by each user
//
// All locks end with the descriptor that took them, and so with its process.
//
// Thread safety: thread-safe. Nothing waits for another process longer than 0.1 s.

#ifndef PINION_ALLOCATOR_RAM_LEDGER_FILE_H_
#define PINION_ALLOCATOR_RAM_LEDGER_FILE_H_

#include <sys/stat.h>

#include <atomic>
#include <cstdint>
#include <string>

namespace pinion::internal {

struct LedgerName {
  std::string name;           // for shm_open, "/x", or a path
  bool in_directory = false;  // a path

  // -1 and errno, as open.
  int Open(int flags) const;
  void Remove() const;
  const char* call() const { return in_directory ? "open" : "shm_open"; }
};

bool IsSameFile(const struct stat& a, const struct stat& b);

// Of a file that was just opened: says that this process uses it. False if it has lost its name
// meanwhile. A process that is stopped while it removes the file is not waited for.
bool LockAsUser(int fd);

// Removes the file if nobody else has it locked. Whoever opens it at the same time finds that it
// has no name any more, and makes another one.
void RemoveIfUnused(int fd, const LedgerName& name);

// Of the shared memory whose names begin so. Killed processes have left them, also those of pid
// namespaces that are no more.
void RemoveUnusedFiles(const std::string& prefix);

// A number from 1 to kMostMembers that nobody else has; 0 if there is none.
inline constexpr uint64_t kMostMembers = 1023;
uint64_t LockMember(int fd);
// By another descriptor than `fd`. True if the system does not tell.
bool MemberIsLocked(int fd, uint64_t member);

// A descriptor that children of fork() do not keep: they would share its locks, and hold them when
// their parent has died.
class UninheritedFd {
 public:
  explicit UninheritedFd(int fd);
  ~UninheritedFd();  // closes it
  UninheritedFd(const UninheritedFd&) = delete;
  UninheritedFd& operator=(const UninheritedFd&) = delete;

  // -1 if the program has closed it, and perhaps opened another file in its place.
  int get() const;

  static void CloseAllInChild();  // for fork()

 private:
  mutable std::atomic<int> fd_;
  struct stat file_ = {};
  UninheritedFd* next_ = nullptr;
  UninheritedFd* before_ = nullptr;
};

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_RAM_LEDGER_FILE_H_
