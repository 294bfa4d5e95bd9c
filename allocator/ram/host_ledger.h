// What the Pinion processes of a host are about to take of its RAM.
//
//   PINION_ASSIGN_OR_RETURN(HostLedger::Reservation reservation, ledger->Reserve(64 * kMiB));
//   const uint64_t pending = reservation.BytesAhead() + 64 * kMiB;   // then look at /proc
//   if (pending > headroom) return ...;                              // gives the share back
//   ... pin 64 MiB ...
//   std::move(reservation).Commit();         // /proc shows them from here on
//
// Each rank of a training job that looks at MemAvailable and then pins passes the mark together
// with all others: what they are about to pin is in no file of the kernel's. It is in the ledger,
// from before the pin until the kernel's numbers show it, and never longer: what is committed is
// not charged twice.
//
// Reservations have an order, and a process that decides counts those before its own: then the
// last of those that are pinning has counted all of them, and two that come at once do not refuse
// each other. Looking into the ledger comes *before* looking at /proc: what was committed in
// between is counted twice rather than never (RamWatermark waits for it and looks again).
//
//   /dev/shm/pinion_ledger_...   | owner  size  turn | owner  size  turn |  ...  one per growth
//
// The ledger is a table of atomic words in shared memory, without a lock that a dead or stopped
// process could hold: an owner that is no longer running (pid and start time) has no reservation,
// whatever state it left. That also heals a table that somebody has overwritten. A child of fork()
// has none of its parent's reservations.
//
// The file is there as long as somebody uses it: users hold a shared lock of it (flock), and the
// last one removes it. What processes that were killed, or exited without destroying their
// allocators, have left is removed by the next that opens a ledger. A program that closes all files
// loses that lock; should the file be removed then, the next reservation makes a new one.
//
// Thread safety: thread-safe. No call waits for another process.
// Ownership: a reservation may outlive its ledger object.

#ifndef PINION_ALLOCATOR_RAM_HOST_LEDGER_H_
#define PINION_ALLOCATOR_RAM_HOST_LEDGER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/base/fork_origin.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/ram/process_identity.h"

namespace pinion {

namespace internal {
struct LedgerName;
}  // namespace internal

class HostLedger : public std::enable_shared_from_this<HostLedger> {
 private:
  struct Table;

 public:
  // Growths that can be under way on a host at once.
  static constexpr int kMaxReservations = 512;

  class Reservation {
   public:
    Reservation(Reservation&&) noexcept = default;
    Reservation& operator=(Reservation&&) = delete;
    ~Reservation() { Release(); }

    // What others have reserved before this, and neither committed nor given up by now.
    uint64_t BytesAhead() const;

    // The memory shows in the kernel's numbers.
    void Commit() && { Release(); }

   private:
    friend class HostLedger;
    Reservation(std::shared_ptr<Table> table, int slot, uint64_t turn, ProcessIdentity owner)
        : table_(std::move(table)), slot_(slot), turn_(turn), owner_(owner) {}
    void Release();

    std::shared_ptr<Table> table_;  // null: moved from or released
    int slot_;
    uint64_t turn_;
    ProcessIdentity owner_;
  };

  // The one that all processes of this user (in this pid namespace) share. Where that cannot be
  // had - no /dev/shm, a full one, a file of somebody else's under its name - one line is logged
  // and this process reserves for itself. One object at a time per process.
  static std::shared_ptr<HostLedger> OfThisUser();

  // As above, under a name for shm_open: "/x". Makes it if there is none.
  static absl::StatusOr<std::shared_ptr<HostLedger>> Open(const std::string& name);
  static std::shared_ptr<HostLedger> OpenOrPrivate(const std::string& name);

  // The one that this user's processes share who name this directory, of whatever pid namespace:
  // for containers on one host, with a directory of a local file system mounted into each.
  //
  //   HostRam ram({}, HostLedger::InDirectory("/run/pinion").value());
  //   PinnedAllocator::Create(options, source, ram);
  //
  // An owner is known by a lock that the kernel ends with its process. A program that closes all
  // files loses what it has reserved at that moment; what somebody writes into the table by mistake
  // may count until the process whose place it names ends. Unavailable, with the path, if the file
  // cannot be had; PermissionDenied if it is another user's; InvalidArgument for an empty name.
  static absl::StatusOr<std::shared_ptr<HostLedger>> InDirectory(const std::string& directory);

  // Of those who hold this object.
  static std::shared_ptr<HostLedger> Private();

  ~HostLedger();
  HostLedger(const HostLedger&) = delete;
  HostLedger& operator=(const HostLedger&) = delete;

  // ResourceExhausted when kMaxReservations are held.
  absl::StatusOr<Reservation> Reserve(uint64_t size_bytes);

  // Of all processes that run.
  uint64_t reserved_bytes() const;

 private:
  explicit HostLedger(std::shared_ptr<Table> table) : table_(std::move(table)) {}

  // The table of the file of that name: `current` if that is it. Makes the file if there is none.
  static absl::StatusOr<std::shared_ptr<Table>> Map(const internal::LedgerName& name,
                                                    std::shared_ptr<Table> current);
  // The table, or the new one where somebody has removed its file.
  std::shared_ptr<Table> CurrentTable();

  const ForkOrigin origin_;
  mutable Mutex mu_;
  std::shared_ptr<Table> table_ ABSL_GUARDED_BY(mu_);
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_RAM_HOST_LEDGER_H_
