// What travels together: bytes that leave a device with one copy, rest in one place, and come back
// with one copy.
//
//              Leave          Evict               claim                EndFetch
//      kNew  --------> kHeld ------> kAway <--------------> kFetching ---------> kFetched
//                                      ^       FailFetch                            |
//                                      +------ every reader has read, or TakeFetched +
//
//   kNew       nothing was copied yet; FillOnHost leads from here to kAway at once
//   kHeld      the copy out is under way, or done; the device memory that it reads is still held
//   kAway      only the bytes at the place are the parcel's; kFetching: somebody brings them back
//   kFetched   the device has them again, in memory of the parcel's own
//
// Where nobody is left to read what was fetched, the parcel stays away.
//
// Those who will need the bytes are its readers. What was fetched is let go of as soon as each of
// them has read it (again), or is gone: that ends an epoch, and the next fetch begins another. The
// last one may have it kept for the next epoch, until it is taken or every reader is gone.
//
// A transition returns what it lets go of: letting go calls the device, so do it with no lock held.
// The copies themselves are DeviceTier's (device_tier.h).
//
// A tenant may derive its own kind of parcel, which knows what the bytes are.
//
// Thread safety: thread-safe.
// Ownership: shared; the parcel owns its place, and device memory while it holds it.

#ifndef PINION_ENGINE_TIER_PARCEL_H_
#define PINION_ENGINE_TIER_PARCEL_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/device/device.h"
#include "pinion/engine/host_buffer.h"
#include "pinion/engine/stream/wait_site.h"
#include "pinion/engine/tier/backing.h"
#include "pinion/engine/tier/device_memory.h"
#include "pinion/engine/tier/guarded_memory.h"
#include "pinion/engine/transfer_engine.h"

namespace pinion {

class Parcel;

// Device memory that a parcel holds is dropped after its copy out.
inline constexpr WaitSite kEvictAfterCopyOut("kEvictAfterCopyOut", kEngineWaits);

// The right and the duty to fetch a parcel. Letting go of it without EndFetch means that the fetch
// has failed: others may try. It keeps the parcel in any case.
class FetchClaim {
 public:
  FetchClaim(FetchClaim&&) = default;
  FetchClaim& operator=(FetchClaim&&) = delete;
  ~FetchClaim() {
    if (parcel_ != nullptr) Fail();
  }

  Parcel& parcel() const { return *parcel_; }
  // Others may try, unless the fetch has ended or failed before. Not of a claim that was moved
  // from.
  void Fail();
  // `fetched` holds all of the parcel's bytes once its copy is done. Returns it if nobody is left
  // to read it.
  [[nodiscard]] GuardedMemory EndFetch(GuardedMemory fetched);

 private:
  friend class Parcel;
  explicit FetchClaim(std::shared_ptr<Parcel> parcel) : parcel_(std::move(parcel)) {}

  std::shared_ptr<Parcel> parcel_;
  bool has_ended_ = false;
};

class Parcel : public std::enable_shared_from_this<Parcel> {
 public:
  enum class State { kNew, kHeld, kAway, kFetching, kFetched };
  using HeldMemory = absl::InlinedVector<DeviceMemory, 1>;

  // One of those who need the bytes. Its fields are the parcel's to touch.
  class Reader {
    friend class Parcel;
    uint64_t read_in_ = 0;  // the epoch in which it has read
  };

  // What a reader is given of a parcel that was fetched.
  struct Read {
    // A reference of the reader's own, or the parcel's, if this was the last reader. Empty: `claim`
    // is set.
    GuardedMemory fetched;
    std::optional<FetchClaim> claim;
  };

  // Its frees and fetches are ordered on `stream` unless a fetch says otherwise.
  Parcel(uint64_t size_bytes, StreamHandle stream, std::shared_ptr<ParcelPlace> place);
  virtual ~Parcel();  // calls the device if memory is held or fetched

  const uint64_t size_bytes;
  const StreamHandle stream;  // what the bytes were computed on

  State state() const { return state_.load(std::memory_order_acquire); }

  // --- out ---
  // What the copy out goes to. Once.
  std::shared_ptr<HostBuffer> ToWrite() { return place_->ToWrite(); }
  // The host has filled what ToWrite gives: the parcel is away from the start. In place of Leave.
  void FillOnHost();
  // The copy out, which reads `held`, was submitted.
  void Leave(const Transfer& copy_out, HeldMemory&& held);
  // Before Leave: one that is done.
  Transfer copy_out() const;
  // One more reference to the piece of device memory that the copy out reads; empty unless kHeld.
  DeviceMemory ShareHeld(size_t piece) const;
  bool Holds(size_t piece) const;
  // Lets go of one piece early; empty if it was let go of.
  [[nodiscard]] GuardedMemory TakeHeld(size_t piece);
  // Lets go of all of them; empty unless kHeld. `not_freed`, if given, counts those that others
  // hold as well.
  [[nodiscard]] GuardedMemory Evict(uint64_t* not_freed = nullptr);

  // --- readers ---
  void AddReaders(int count);
  // Returns what was fetched, if all others have read it.
  [[nodiscard]] GuardedMemory RemoveReader(const Reader& reader);
  // The reader needs the parcel no more in this epoch, since it has found the bytes elsewhere.
  [[nodiscard]] GuardedMemory MarkRead(Reader& reader);

  // --- back ---
  // Blocks the host while another thread fetches. Neither kNew nor kHeld.
  Read ReadOrClaim(Reader& reader);
  // What becomes of what was fetched, where all have read it by now.
  enum class Afterwards { kLetGo, kKeep };
  // The same into `read` where the parcel is fetched; never blocks. Else false.
  bool ReadIfFetched(Reader& reader, std::optional<Read>& read,
                     Afterwards afterwards = Afterwards::kLetGo);
  // Nothing unless the parcel is away.
  std::optional<FetchClaim> ClaimIfAway();
  // Where a fetch copies from: pinned memory that holds the bytes once its tickets are done.
  absl::StatusOr<std::shared_ptr<HostBuffer>> ToRead() { return place_->ToRead(); }
  // Lets go of what was fetched, whoever has not read it yet; empty unless kFetched.
  [[nodiscard]] GuardedMemory TakeFetched();

  // The bytes, for the host to read once the parcel has left. Blocks until they are there;
  // DeadlineExceeded after `timeout`.
  absl::StatusOr<std::shared_ptr<HostBuffer>> ViewOnHost(absl::Duration timeout);

 private:
  friend class FetchClaim;

  struct Readers {
    int count = 0;
    int have_read = 0;  // of those, in this epoch
    uint64_t epoch = 1;
  };

  void Become(State state) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    state_.store(state, std::memory_order_release);
  }
  GuardedMemory EndFetch(GuardedMemory fetched);
  void FailFetch();
  GuardedMemory EndEpoch() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  GuardedMemory EndEpochIfAllHaveRead(Afterwards afterwards) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Read ReadLocked(Reader& reader, Afterwards afterwards) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  GuardedMemory MarkReadLocked(Reader& reader, Afterwards afterwards)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::shared_ptr<ParcelPlace> place_;

  mutable Mutex mu_;
  CondVar fetch_ended_;
  std::atomic<State> state_ = State::kNew;  // written under mu_
  Transfer copy_out_ ABSL_GUARDED_BY(mu_);
  HeldMemory held_ ABSL_GUARDED_BY(mu_);  // pieces that were let go of are empty
  GuardedMemory fetched_ ABSL_GUARDED_BY(mu_);
  Readers readers_ ABSL_GUARDED_BY(mu_);
};

}  // namespace pinion

#endif  // PINION_ENGINE_TIER_PARCEL_H_
