// Lists of operations on a PinnedAllocator, checked against a trivial model: who holds which bytes,
// and which bytes nobody may have yet.
//
//   const OperationsResult result = RunOperations({RandomOperations(seed, 20000)});
//   ASSERT_EQ(result.failure, "") << "seed " << seed;
//
// A list is bytes, and all bytes are a list, so a fuzzer can make them up as well. The first three
// choose the allocator's options; every three that follow are one operation: what, and two
// operands.
//
// A list goes from thread to thread, one at a time, as it says itself: blocks are allocated on one
// thread and released on another, threads end, and all of it happens again with the same bytes.
//
// Several lists share one allocator, each on a thread of its own with a model of its own, and hand
// live blocks to one another; what another thread does to a list's bytes is found by what the list
// has written there.

#ifndef PINION_TESTS_ALLOCATOR_ALLOCATOR_OPERATIONS_H_
#define PINION_TESTS_ALLOCATOR_ALLOCATOR_OPERATIONS_H_

#include <cstdint>
#include <string>
#include <vector>

namespace pinion::testing {

using OperationList = std::vector<uint8_t>;

// `count` operations on an allocator whose options are drawn as well.
OperationList RandomOperations(uint64_t seed, uint64_t count);

struct OperationsResult {
  std::string failure;  // the first claim that did not hold; empty if all did
  uint64_t operations = 0;
  uint64_t allocations = 0;        // that succeeded
  uint64_t refusals = 0;           // that did not
  uint64_t deferred_releases = 0;  // with a ticket that was not done
  uint64_t reuses = 0;             // of bytes that had waited for a ticket
  uint64_t crossings = 0;          // releases of blocks that were allocated on another thread
};

// From an empty allocator, made as the first list says, until nothing is locked any more.
OperationsResult RunOperations(const std::vector<OperationList>& lists);

}  // namespace pinion::testing

#endif  // PINION_TESTS_ALLOCATOR_ALLOCATOR_OPERATIONS_H_
