// The simplest source: host memory from the C++ heap.
//
//   PINION_ASSIGN_OR_RETURN(auto allocator,
//                           PinnedAllocator::Create({}, std::make_shared<HeapSource>()));
//
// Pages become resident at their first use, so a host without free memory kills the process then. A
// child of fork() has copies of the segments and may free them.
//
// Thread safety: thread-safe (it has no state).

#ifndef PINION_TESTS_SUPPORT_HEAP_SOURCE_H_
#define PINION_TESTS_SUPPORT_HEAP_SOURCE_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/host_memory_source.h"

namespace pinion::testing {

class HeapSource final : public HostMemorySource {
 public:
  std::string name() const override { return "heap"; }
  bool pinned() const override { return true; }
  uint64_t granularity_bytes() const override { return uint64_t{2} << 20; }
  absl::StatusOr<HostSegment> Allocate(uint64_t size_bytes) override;
  absl::Status Free(const HostSegment& segment) override;
};

}  // namespace pinion::testing

#endif  // PINION_TESTS_SUPPORT_HEAP_SOURCE_H_
