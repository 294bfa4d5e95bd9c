// Runs lists of operations on a PinnedAllocator and checks it against a simple model of which bytes
// are held and which bytes must not be reused yet.
//
//   const OperationsResult result = RunOperations({RandomOperations(seed, 20000)});
//   ASSERT_EQ(result.failure, "") << "seed " << seed;
//
// A list is a string of bytes, and every string is a valid list, so a fuzzer can generate it. The
// first three bytes choose the allocator's options. Each further three bytes are one operation and
// its two operands.
//
// A single list moves between threads: blocks are released on other threads than they were
// allocated on, and threads end meanwhile. The same bytes always give the same run.
//
// Several lists share one allocator. Each runs on its own thread with its own model, and lists hand
// live blocks to one another. Stamps in the blocks reveal bytes that another thread changed.

#ifndef PINION_TESTS_ALLOCATOR_ALLOCATOR_OPERATIONS_H_
#define PINION_TESTS_ALLOCATOR_ALLOCATOR_OPERATIONS_H_

#include <cstdint>
#include <string>
#include <vector>

namespace pinion::testing {

using OperationList = std::vector<uint8_t>;

// Returns `count` random operations and random options.
OperationList RandomOperations(uint64_t seed, uint64_t count);

struct OperationsResult {
  std::string failure;  // first failed check; empty if all passed
  uint64_t operations = 0;
  uint64_t allocations = 0;        // successful
  uint64_t refusals = 0;           // failed
  uint64_t deferred_releases = 0;  // with a pending ticket
  uint64_t reuses = 0;             // of bytes that had waited for a ticket
  uint64_t crossings = 0;          // releases on another thread than the allocation

  // Adds the counters. The first failure stays.
  void Add(const OperationsResult& other);
};

// Creates an allocator with the first list's options, runs `lists`, and releases everything.
OperationsResult RunOperations(const std::vector<OperationList>& lists);

}  // namespace pinion::testing

#endif  // PINION_TESTS_ALLOCATOR_ALLOCATOR_OPERATIONS_H_
