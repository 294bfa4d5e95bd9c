// The records behind blocks and segments. They lie outside of the memory that they describe, which
// a device may be writing to.

#ifndef PINION_ALLOCATOR_SEGMENT_H_
#define PINION_ALLOCATOR_SEGMENT_H_

#include <cstdint>

#include "pinion/allocator/host_memory_source.h"

namespace pinion::internal {

struct Segment;

enum class BlockState : uint8_t {
  kUnused,    // the record describes nothing
  kFree,      // in a free list
  kLive,      // a PinnedBlock owns it
  kDeferred,  // released, waiting for tickets
};

struct BlockRecord {
  char* data = nullptr;
  uint64_t capacity_bytes = 0;
  uint64_t size_bytes = 0;  // as asked for; of live blocks
  uint64_t id = 0;          // of live and deferred blocks
  Segment* segment = nullptr;
  // The neighbours by address within the segment; null at its ends.
  BlockRecord* before = nullptr;
  BlockRecord* after = nullptr;
  // The free list of the block's bucket. Unused records are chained through `next_free`.
  BlockRecord* previous_free = nullptr;
  BlockRecord* next_free = nullptr;
  uint32_t pending_tickets = 0;
  BlockState state = BlockState::kUnused;
};

struct Segment {
  HostSegment memory;
  BlockRecord* first = nullptr;  // the block at the segment's start
  uint64_t used_blocks = 0;      // live and deferred ones
  uint64_t used_bytes = 0;
  bool small = false;  // cut into small blocks
};

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_SEGMENT_H_
