// Where parcels rest while they are not on the device.
//
//   PINION_ASSIGN_OR_RETURN(std::shared_ptr<ParcelPlace> place,
//                           backing->Reserve(pool, size_bytes));
//   // out: a copy into place->ToWrite(), then place->Written(copy)
//   // back: a copy from place->ToRead()
//
// PinnedBacking keeps the bytes in pinned host memory, where the copies put them. Another backing
// may carry them further, to a file for example, as soon as the copy out is done, give the pinned
// memory back, and fetch the bytes into pinned memory again when they are needed. A copy is ordered
// after such work by the tickets that it leaves on the buffer (host_buffer.h). A program hands one
// to the tenant whose parcels are to rest there (OffloadOptions::backing).
//
// Thread safety: thread-safe, both, and called with no lock held. A place's destructor may run on
// any thread, while copies that touch its buffers are still under way.
// Ownership: a tenant keeps its backing, and what was saved keeps the tenant's; the buffers that a
// place has given out may outlive both, and hold the pool's block. A backing may keep the pool.
// Errors: ResourceExhausted where there is no room (what was to rest there stays on the device);
// whatever reading back may meet. Nothing throws.

#ifndef PINION_ENGINE_TIER_BACKING_H_
#define PINION_ENGINE_TIER_BACKING_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/engine/host_buffer.h"
#include "pinion/engine/transfer_engine.h"

namespace pinion {

class ParcelPlace {
 public:
  virtual ~ParcelPlace() = default;

  // Pinned memory for the copy out, of at least the size that was reserved. Asked for once.
  virtual std::shared_ptr<HostBuffer> ToWrite() = 0;

  // The copy into that memory was submitted. Makes no device call.
  virtual void Written(const Transfer& copy_out) = 0;

  // Pinned memory that holds the bytes, once the tickets that are on it are done. Does not wait for
  // them. Only after Written; may be asked for again.
  virtual absl::StatusOr<std::shared_ptr<HostBuffer>> ToRead() = 0;
};

class Backing {
 public:
  virtual ~Backing() = default;
  // Pinned memory comes from `pool`, the tier's.
  virtual absl::StatusOr<std::shared_ptr<ParcelPlace>> Reserve(
      const std::shared_ptr<PinnedAllocator>& pool, uint64_t size_bytes) = 0;
};

class PinnedBacking final : public Backing {
 public:
  // Errors as those of PinnedAllocator::Allocate.
  absl::StatusOr<std::shared_ptr<ParcelPlace>> Reserve(const std::shared_ptr<PinnedAllocator>& pool,
                                                       uint64_t size_bytes) override;
};

}  // namespace pinion

#endif  // PINION_ENGINE_TIER_BACKING_H_
