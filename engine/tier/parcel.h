// A unit of offloading: bytes that leave a device with one copy, are stored in one place, and
// return with one copy.
//
//              Leave          Evict               claim                EndFetch
//      kNew  --------> kHeld ------> kAway <--------------> kFetching ---------> kFetched
//                                      ^       Fail                                 |
//                                      +------ every reader has read, or TakeFetched +
//
//   kNew       nothing is copied; FillOnHost leads directly to kAway
//   kHeld      the copy out is submitted or done; its device memory is still held
//   kAway      offloaded: only the stored bytes exist
//   kFetching  a claim's owner copies the bytes back
//   kFetched   resident again, in device memory of the parcel's own
//
// If no reader is left at EndFetch, the parcel stays kAway.
//
// Readers are the users of the bytes. Fetched memory is released when each reader has read it in
// this epoch, or is gone. This ends the epoch; the next fetch starts another. The last reader may
// keep the memory for the next epoch (Afterwards::kKeep), until TakeFetched or until no reader
// remains.
//
// Transitions return the memory that they release. Destroying it calls the device, so destroy it
// with no lock held. DeviceTier (device_tier.h) makes the copies. A tenant may derive its own kind
// of parcel, with a description of the bytes.
//
// Thread safety: thread-safe.
// Ownership: shared; the parcel owns its place and its device memory.

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
#include "pinion/engine/copy_batch.h"
#include "pinion/engine/stream/wait_site.h"
#include "pinion/engine/tier/backing.h"
#include "pinion/engine/tier/guarded_memory.h"
#include "pinion/engine/transfer_engine.h"

namespace pinion {

class Parcel;

// Device memory that a parcel holds is evicted after its copy out.
inline constexpr WaitSite kEvictAfterCopyOut("kEvictAfterCopyOut", kEngineWaits);

// The exclusive right and duty to fetch a parcel. Destroying it before EndFetch fails the fetch,
// and others may try. Keeps the parcel alive.
class FetchClaim {
 public:
  FetchClaim(FetchClaim&&) = default;
  FetchClaim& operator=(FetchClaim&&) = delete;
  ~FetchClaim() {
    if (parcel_ != nullptr) Fail();
  }

  Parcel& parcel() const { return *parcel_; }
  // Fails the fetch, so that others may try; does nothing after its end. Not after a move.
  void Fail();
  // Ends the fetch: `fetched` holds the bytes after its copy. Returns it if no reader is left.
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

  // A user of the bytes. Only the parcel accesses its fields.
  class Reader {
    friend class Parcel;
    uint64_t read_in_ = 0;  // epoch of the last read
  };

  // The result of reading a parcel: the fetched memory, or the claim to fetch it.
  struct Read {
    // The reader's own reference, or the parcel's for the last reader. Empty if `claim` is set.
    GuardedMemory fetched;
    std::optional<FetchClaim> claim;
  };

  // Frees and fetches are ordered on `stream`, except fetches that name another one.
  Parcel(uint64_t size_bytes, StreamHandle stream, std::shared_ptr<ParcelPlace> place);
  virtual ~Parcel();  // calls the device if memory is held or fetched

  const uint64_t size_bytes;
  const StreamHandle stream;  // the stream that computed the bytes

  State state() const { return state_.load(std::memory_order_acquire); }

  // --- offload ---
  // Returns the destination of the copy out. Called once.
  std::shared_ptr<HostBuffer> ToWrite();
  // Instead of Leave: the host has filled ToWrite's buffer, and the parcel is kAway from the start.
  void FillOnHost();
  // Records the submitted copy out, which reads `held`.
  void Leave(const Transfer& copy_out, HeldMemory&& held);
  // Returns the copy out; before Leave, one that is done.
  Transfer copy_out() const;
  // Returns another reference to a piece of held device memory; empty outside of kHeld.
  DeviceMemory ShareHeld(size_t piece) const;
  bool Holds(size_t piece) const;
  // Releases one piece early; empty if it was released.
  [[nodiscard]] GuardedMemory TakeHeld(size_t piece);
  // Evicts the held device memory; empty outside of kHeld. Adds to `not_freed`, if given, the
  // pieces with other references, whose memory stays allocated.
  [[nodiscard]] GuardedMemory Evict(uint64_t* not_freed = nullptr);

  // --- readers ---
  void AddReaders(int count);
  // Removes a reader. Returns the fetched memory if all other readers have read it.
  [[nodiscard]] GuardedMemory RemoveReader(const Reader& reader);
  // Marks the parcel as read in this epoch: the reader found the bytes elsewhere.
  [[nodiscard]] GuardedMemory MarkRead(Reader& reader);

  // --- fetch ---
  // Whether fetched memory is kept after all readers have read it.
  enum class Afterwards { kLetGo, kKeep };
  // Returns the fetched memory, or a claim if the parcel is kAway. Blocks while another thread
  // fetches. Not for kNew and kHeld.
  Read ReadOrClaim(Reader& reader, Afterwards afterwards = Afterwards::kLetGo);
  // Reads into `read` and returns true if the parcel is kFetched. Never blocks.
  bool ReadIfFetched(Reader& reader, std::optional<Read>& read, Afterwards afterwards);
  // Claims the fetch if the parcel is kAway.
  std::optional<FetchClaim> ClaimIfAway();
  // Returns the source of a fetch: pinned memory that holds the bytes once its tickets are done.
  absl::StatusOr<std::shared_ptr<HostBuffer>> ToRead();
  // Releases the fetched memory, even if readers are left; empty outside of kFetched.
  [[nodiscard]] GuardedMemory TakeFetched();

  // Returns the bytes for reading on the host, after the parcel has left. Blocks until they are
  // stored; DeadlineExceeded after `timeout`.
  absl::StatusOr<std::shared_ptr<HostBuffer>> ViewOnHost(absl::Duration timeout);

 private:
  friend class FetchClaim;

  struct Readers {
    int count = 0;
    int have_read = 0;  // readers that have read in this epoch
    uint64_t epoch = 1;
  };

  void Become(State state) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    state_.store(state, std::memory_order_release);
  }
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
  HeldMemory held_ ABSL_GUARDED_BY(mu_);  // released pieces are empty
  GuardedMemory fetched_ ABSL_GUARDED_BY(mu_);
  Readers readers_ ABSL_GUARDED_BY(mu_);
};

}  // namespace pinion

#endif  // PINION_ENGINE_TIER_PARCEL_H_
