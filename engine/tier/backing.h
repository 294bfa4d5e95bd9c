// Decides where offloaded parcels are stored: in pinned host memory (PinnedBacking), or in a
// backing of your own.
//
//   PINION_ASSIGN_OR_RETURN(std::shared_ptr<ParcelPlace> place,
//                           backing->Reserve(pool, size_bytes));
//   // offload: copy into place->ToWrite(), then call place->Written(copy)
//   // fetch:   copy from place->ToRead()
//
// Implement Backing to move the bytes further, for example to a file. Once the copy out is done,
// such a backing writes the bytes there and frees the pinned memory. When they are needed, it reads
// them into pinned memory again. Tickets on the buffer (copy_batch.h) order the copy after this
// work. Pass the backing to the tenant whose parcels it stores (OffloadOptions::backing).
//
// Errors: ResourceExhausted if there is no space; the parcel then stays on the device. ToRead
// returns any error of reading the bytes back. Nothing throws.
// Thread safety: both classes are thread-safe and called with no lock held. A place's destructor
// may run on any thread, while copies still touch its buffers.
// Ownership: a tenant and its saved data keep the backing alive. A place's buffers hold the pool's
// block, and may outlive both. A backing may keep the pool.

#ifndef PINION_ENGINE_TIER_BACKING_H_
#define PINION_ENGINE_TIER_BACKING_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/engine/transfer_engine.h"

namespace pinion {

class ParcelPlace {
 public:
  virtual ~ParcelPlace() = default;

  // Returns pinned memory of at least the reserved size for the copy out. Called once.
  virtual std::shared_ptr<HostBuffer> ToWrite() = 0;

  // Reports that the copy into that memory was submitted. Must make no device call.
  virtual void Written(const Transfer& copy_out) = 0;

  // Returns pinned memory that holds the bytes once its tickets are done. Does not wait for them.
  // Called after Written, maybe several times.
  virtual absl::StatusOr<std::shared_ptr<HostBuffer>> ToRead() = 0;
};

class Backing {
 public:
  virtual ~Backing() = default;
  // Reserves storage for a parcel. `pool` is the tier's pool, for pinned memory.
  virtual absl::StatusOr<std::shared_ptr<ParcelPlace>> Reserve(
      const std::shared_ptr<PinnedAllocator>& pool, uint64_t size_bytes) = 0;
};

class PinnedBacking final : public Backing {
 public:
  // Returns the errors of PinnedAllocator::Allocate, and InvalidArgument for a null pool.
  absl::StatusOr<std::shared_ptr<ParcelPlace>> Reserve(const std::shared_ptr<PinnedAllocator>& pool,
                                                       uint64_t size_bytes) override;
};

}  // namespace pinion

#endif  // PINION_ENGINE_TIER_BACKING_H_
