// Records of blocks and of the memory that they are cut from. They lie outside that memory, because
// a device may be writing to it.

#ifndef PINION_ALLOCATOR_HEAP_SEGMENT_H_
#define PINION_ALLOCATOR_HEAP_SEGMENT_H_

#include <cstdint>
#include <vector>

#include "pinion/allocator/host_memory_source.h"

namespace pinion::internal {

class Arena;

enum class BlockState : uint8_t {
  kUnused,    // the record describes nothing
  kFree,      // in a free list, or in hand
  kLive,      // owned by a PinnedBlock; this state and the next two are in use
  kReleased,  // released, but not yet entered in the books
  kDeferred,  // released, waiting for tickets
  kSlab,      // cut into small blocks
  kEnds,      // no block: the ends of a run
};

// One cache line.
struct alignas(64) BlockRecord {
  char* data = nullptr;
  uint64_t capacity_bytes = 0;
  // Neighbours by address within the run. The outermost blocks have the run's `ends`.
  BlockRecord* before = nullptr;
  BlockRecord* after = nullptr;
  union {
    uint64_t size_bytes = 0;  // of used blocks: as requested
    // Links of the bucket's free list. Unused records are chained too.
    BlockRecord* next_free;
  };
  union {
    uint64_t pending_tickets = 0;  // of deferred blocks
    BlockRecord* previous_free;
  };
  uint64_t id = 0;  // of used blocks
  int16_t numa_node = -1;
  BlockState state = BlockState::kUnused;
};
static_assert(sizeof(BlockRecord) == 64);

inline void Connect(BlockRecord& before, BlockRecord& after) {
  before.after = &after;
  after.before = &before;
}

// Contiguous memory that is cut into blocks: adjacent segments, or a slab. A slab is a block of
// another run, which is cut into small blocks.
struct Run {
  Run() {
    ends.state = BlockState::kEnds;
    ends.before = &ends;
    ends.after = &ends;
  }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  std::vector<HostSegment> segments;  // by address, of one NUMA node; or the slab
  BlockRecord ends;                   // closes the ring of neighbours
  BlockRecord* slab = nullptr;        // the slab's own block; null for segments
};

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_HEAP_SEGMENT_H_
