// Counts the host RAM that a user's Pinion processes are about to take, before the kernel's numbers
// show it. Otherwise ranks that read MemAvailable at the same time pass the watermark together.
//
//   const HostLedger::Reservation reservation = ledger.Reserve(64 * kMiB);
//   const uint64_t pending = reservation.BytesAhead() + 64 * kMiB;   // first this, then /proc
//   if (pending > headroom) return ...;
//   ... pin 64 MiB ...                      // the destructor ends the reservation
//
// Reservations are ordered, and each counts the earlier ones. So of several concurrent reservations
// the first counts none of the others, and the last counts all. A reservation should end when the
// kernel's numbers show its memory.
//
// A reservation of n bytes is a lock on n bytes of an empty file. The kernel keeps the locks, and
// ends the locks of a killed process. Exception: if a process forks during a reservation and is
// then killed, the reservation lasts until the child ends or calls exec.
//
// Reserve chooses the range under a lock of the file's first byte. If another process is stopped
// with that lock, Reserve goes on without the lock after some 20 ms. Two concurrent reservations
// may then count each other. They never miss each other.
//
// If a reservation cannot be recorded (no /dev/shm, no free descriptor), it neither counts others
// nor is counted. If the locks cannot be read later, it counts no others. A warning is logged once
// per process.
//
// Thread safety: thread-safe. Ownership: a value. Reservations may outlive their ledger.

#ifndef PINION_ALLOCATOR_RAM_HOST_LEDGER_H_
#define PINION_ALLOCATOR_RAM_HOST_LEDGER_H_

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "pinion/allocator/base/fork_origin.h"

namespace pinion {

class HostLedger {
 public:
  class Reservation {
   public:
    Reservation(Reservation&& other) noexcept
        : fd_(std::exchange(other.fd_, -1)), begin_(other.begin_), origin_(other.origin_) {}
    Reservation& operator=(Reservation&&) = delete;
    ~Reservation();

    // Returns the bytes of earlier reservations that have not ended.
    uint64_t BytesAhead() const;

   private:
    friend class HostLedger;
    explicit Reservation(int fd) : fd_(fd) {}

    int fd_;           // -1: nothing is recorded
    off_t begin_ = 0;  // of the locked range
    ForkOrigin origin_;
  };

  // Records nothing, and has no reservations.
  HostLedger() = default;

  // Returns the ledger of all processes of this user that share /dev/shm.
  static HostLedger OfThisUser();

  // Returns the ledger of all processes of this user that name this directory of a local file
  // system. For containers that do not share /dev/shm: mount one directory into each.
  //
  //   HostRam ram({}, HostLedger::InDirectory("/run/pinion").value());
  //   PinnedAllocator::Create(options, source, ram);
  //
  // Creates an empty file in the directory, which is not removed. Errors: InvalidArgument for an
  // empty name, PermissionDenied if the file is another user's, and Unavailable (with the path) if
  // the file cannot be opened or locked.
  static absl::StatusOr<HostLedger> InDirectory(const std::string& directory);

  // Reserves from 1 to 2^60 bytes.
  Reservation Reserve(uint64_t size_bytes) const;

  // Returns the bytes that are reserved by all processes.
  uint64_t reserved_bytes() const;

 private:
  explicit HostLedger(std::string path) : path_(std::move(path)) {}
  absl::StatusOr<Reservation> TryReserve(uint64_t size_bytes) const;

  std::string path_;  // empty: records nothing
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_RAM_HOST_LEDGER_H_
