// Where segments of host memory come from.
//
// The allocator owns policy, not memory: it is given a source. Plain sources live in
// allocator/sources, pinned ones in device/cuda and device/emulated; a source may wrap another one.
//
// Thread safety: implementations are thread-safe. The allocator calls none with a lock held, but
// for JoinsAt, which only computes. Allocate and Free may call the allocator, but must not wait for
// another thread that calls it: one thread at a time grows or trims.

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

  // "cudaHostAlloc", "emulated pinned", "mlock": for statistics and messages.
  virtual std::string name() const = 0;

  // Whether its pages are locked in RAM: what PinnedBlock::pinned() says of its blocks.
  virtual bool pinned() const = 0;

  // Sizes are multiples of this, and so are the addresses that are returned. A power of two.
  virtual uint64_t granularity_bytes() const = 0;

  // Whether a block may cross `border`, where one segment ends and another begins: whoever copies
  // it has to manage with that.
  virtual bool JoinsAt(const void* /*border*/) const { return false; }

  // `size_bytes` is a positive multiple of granularity_bytes(). ResourceExhausted when the memory
  // cannot be had (any error latched by the device has been cleared); any other code means that
  // the source is broken and asking again is useless.
  virtual absl::StatusOr<HostSegment> Allocate(uint64_t size_bytes) = 0;

  // `segment` came from this source and nothing uses it any more. May synchronise a device.
  virtual absl::Status Free(const HostSegment& segment) = 0;
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_HOST_MEMORY_SOURCE_H_
