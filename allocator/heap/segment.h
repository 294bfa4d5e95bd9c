// The records behind blocks and the memory that they are cut from. They lie outside of the memory
// that they describe, which a device may be writing to.

#ifndef PINION_ALLOCATOR_HEAP_SEGMENT_H_
#define PINION_ALLOCATOR_HEAP_SEGMENT_H_

#include <cstdint>
#include <vector>

#include "pinion/allocator/host_memory_source.h"

namespace pinion::internal {

class Arena;
struct Run;

enum class BlockState : uint8_t {
  kUnused,    // the record describes nothing
  kFree,      // in a free list
  kLive,      // a PinnedBlock owns it
  kReleased,  // ... no more, but that is not in the books yet
  kDeferred,  // released, waiting for tickets
  kSlab,      // cut into small blocks
};

struct BlockRecord {
  Arena* arena = nullptr;  // that it belongs to, for as long as the record exists
  char* data = nullptr;
  uint64_t capacity_bytes = 0;
  uint64_t size_bytes = 0;  // as asked for; of live blocks
  uint64_t id = 0;          // of live and deferred blocks
  Run* run = nullptr;
  // The neighbours by address within the run; null at its ends.
  BlockRecord* before = nullptr;
  BlockRecord* after = nullptr;
  // The free list of the block's bucket. Unused records are chained through `next_free`.
  BlockRecord* previous_free = nullptr;
  BlockRecord* next_free = nullptr;
  uint32_t pending_tickets = 0;
  int16_t numa_node = -1;  // of its run, which changes while other threads grow
  BlockState state = BlockState::kUnused;
};

// Memory without a gap that is cut into blocks: segments side by side, or a slab, which is a block
// of such a run that is cut into small blocks itself.
struct Run {
  std::vector<HostSegment> segments;  // by address, of one NUMA node; of a slab, the slab
  BlockRecord* first = nullptr;       // the blocks at its ends
  BlockRecord* last = nullptr;
  uint64_t used_bytes = 0;      // of live and deferred blocks, those in slabs included
  BlockRecord* slab = nullptr;  // of a slab: the block that it is
};

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_HEAP_SEGMENT_H_
