// The records behind blocks and the memory that they are cut from. They lie outside of the memory
// that they describe, which a device may be writing to.

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
  kLive,      // a PinnedBlock owns it; this and the next two are in use
  kReleased,  // ... no more, but that is not in the books yet
  kDeferred,  // released, waiting for tickets
  kSlab,      // cut into small blocks
  kEnds,      // no block: before the first and after the last one of a run
};

// One cache line.
struct alignas(64) BlockRecord {
  char* data = nullptr;
  uint64_t capacity_bytes = 0;
  // The neighbours by address within the run; the outermost ones have its `ends`.
  BlockRecord* before = nullptr;
  BlockRecord* after = nullptr;
  union {
    uint64_t size_bytes = 0;  // of used blocks: as asked for
    // The free list of the block's bucket. Unused records are chained, too.
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

// Memory without a gap that is cut into blocks: segments side by side, or a slab, which is a block
// of such a run that is cut into small blocks itself.
struct Run {
  Run() {
    ends.state = BlockState::kEnds;
    ends.before = &ends;
    ends.after = &ends;
  }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  std::vector<HostSegment> segments;  // by address, of one NUMA node; of a slab, the slab
  BlockRecord ends;  // in the ring of neighbours, between the last block and the first one
  BlockRecord* slab = nullptr;  // of a slab: the block that it is
};

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_HEAP_SEGMENT_H_
