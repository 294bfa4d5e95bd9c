// The host allocations and frees of a training program, step by step. Recorded once; replayed by
// allocator_bench and by tests.
//
//   # comment
//   s             a training step begins
//   a 17 786432   block 17, 786432 bytes, is allocated
//   f 17          and freed
//
// Thread safety: pure functions and values.

#ifndef PINION_BENCH_ALLOCATOR_ALLOCATION_TRACE_H_
#define PINION_BENCH_ALLOCATOR_ALLOCATION_TRACE_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace pinion {

struct AllocationEvent {
  enum class Kind { kAllocate, kFree };
  Kind kind = Kind::kAllocate;
  uint32_t block = 0;       // freed numbers are reused
  uint64_t size_bytes = 0;  // of kAllocate
};

struct AllocationTrace {
  std::string name;  // of the program: "gpt2_small"
  std::vector<AllocationEvent> events;
  uint32_t blocks = 0;  // one more than the largest number of a block
  uint64_t allocations = 0;
  uint64_t peak_bytes = 0;  // of live blocks
};

// InvalidArgument names a line that cannot be parsed, allocates a live block, frees a free block,
// or leaves a block live at the end.
absl::StatusOr<AllocationTrace> ParseAllocationTrace(std::string name, std::string_view text);
// Names the trace after the file, without folder and ".txt". Errors: NotFound, and those of
// ParseAllocationTrace.
absl::StatusOr<AllocationTrace> ReadAllocationTrace(const std::string& path);

}  // namespace pinion

#endif  // PINION_BENCH_ALLOCATOR_ALLOCATION_TRACE_H_
