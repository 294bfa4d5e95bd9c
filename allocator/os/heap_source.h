// Plain host memory from the operating system: pageable, for programs without a device.
//
// Pages are populated when a segment is made, so that the host's figures show at once what the
// allocator has taken.
//
// Thread safety: thread-safe (it has no state).

#ifndef PINION_ALLOCATOR_OS_HEAP_SOURCE_H_
#define PINION_ALLOCATOR_OS_HEAP_SOURCE_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/host_memory_source.h"

namespace pinion {

class HeapSource final : public HostMemorySource {
 public:
  std::string name() const override { return "heap"; }
  uint64_t granularity_bytes() const override;
  // ResourceExhausted where the system refuses; the message says why.
  absl::StatusOr<HostSegment> Allocate(uint64_t size_bytes) override;
  absl::Status Free(const HostSegment& segment) override;
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_OS_HEAP_SOURCE_H_
