// Provides segments of host memory to a PinnedAllocator.
//
// Sources of plain memory are in allocator/sources, of pinned memory in device/cuda and
// device/emulated. A source may wrap another one.
//
// Thread safety: implementations are thread-safe. The allocator calls a source without a lock.
// Exception: JoinsAt, which must only compute. Allocate and Free may call the allocator. They must
// not wait for another thread that calls it, because that thread may wait for this growth or trim.

#ifndef PINION_ALLOCATOR_HOST_MEMORY_SOURCE_H_
#define PINION_ALLOCATOR_HOST_MEMORY_SOURCE_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace pinion {

struct HostSegment {
  void* data = nullptr;
  uint64_t size_bytes = 0;
  int numa_node = -1;  // -1: unknown or spread
};

class HostMemorySource {
 public:
  virtual ~HostMemorySource() = default;

  // Returns a name for statistics and messages: "cudaHostAlloc", "emulated pinned", "mlock".
  virtual std::string name() const = 0;

  // Returns whether the pages are locked in RAM. PinnedBlock::pinned() reports it.
  virtual bool pinned() const = 0;

  // Returns a power of two. Segment sizes and addresses are multiples of it.
  virtual uint64_t granularity_bytes() const = 0;

  // Returns whether a block may cross `border`, the end of one segment and the beginning of
  // another. A copy of such a block must cope with the border.
  virtual bool JoinsAt(const void* /*border*/) const { return false; }

  // Returns a segment of `size_bytes`. InvalidArgument unless that is a positive multiple of
  // granularity_bytes(). ResourceExhausted if there is not enough memory; an error that the device
  // has latched is cleared before. Any other code means that the source is broken and a retry is
  // useless.
  virtual absl::StatusOr<HostSegment> Allocate(uint64_t size_bytes) = 0;

  // Frees a segment of this source that is no longer in use. May synchronise a device.
  virtual absl::Status Free(const HostSegment& segment) = 0;

 protected:
  // Returns InvalidArgument unless Allocate may return a segment of `size_bytes`.
  absl::Status CheckSize(uint64_t size_bytes) const {
    if (size_bytes > 0 && size_bytes % granularity_bytes() == 0) return absl::OkStatus();
    return absl::InvalidArgumentError(name() + ": " + std::to_string(size_bytes) +
                                      " bytes are no positive multiple of " +
                                      std::to_string(granularity_bytes()) +
                                      ": ask for a positive multiple of granularity_bytes()");
  }
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_HOST_MEMORY_SOURCE_H_
