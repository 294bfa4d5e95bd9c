// Checks of what programs do with blocks, and what they say. A block that is released twice is
// found in every build. Hardened ones (--//config:hardening, every
// sanitizer configuration) also have red zones behind blocks, and a pattern in free memory.
//
// A device writes without asking a sanitizer, so these find what AddressSanitizer cannot: a copy
// that is longer than its block, or that still runs when its block is free. A read is not found,
// but what it gets is plain: kFreePattern in free memory and in bytes nobody has written to yet
// (-6e32 as a float), kRedZonePattern behind a block's end.
//
// Thread safety: thread-safe on different blocks.

#ifndef PINION_ALLOCATOR_HEAP_HARDENING_H_
#define PINION_ALLOCATOR_HEAP_HARDENING_H_

#include <cstdint>

#include "pinion/allocator/heap/segment.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/config/build_config.h"

namespace pinion::internal {

using config::kHardened;

inline constexpr unsigned char kFreePattern = 0xF5;
inline constexpr unsigned char kRedZonePattern = 0xBD;

// Room that is added to each request for a red zone. What rounding adds belongs to it too.
inline constexpr uint64_t kRedZoneBytes = kHardened ? 64 : 0;

// Says that the block that had this id was released before, and dies; CheckReleased unless it is
// this one, in `state`.
void DieOfRelease(const BlockRecord& block, uint64_t id);
inline void CheckReleased(const BlockRecord& block, uint64_t id, BlockState state) {
  if (block.id != id || block.state != state) [[unlikely]]
    DieOfRelease(block, id);
}

// --- Hardened builds only ---

// Fills free memory with the pattern.
void PoisonFree(void* data, uint64_t size_bytes);

// Dies if free memory that is about to go back was written to.
void CheckFreeSegment(const HostSegment& segment);

// Dies if `block`, just taken, was written to while it was free; then marks its red zone.
void PrepareBlock(const BlockRecord& block);

// Dies if the red zone was written to; then fills the block with the pattern.
void CheckAndPoisonBlock(const BlockRecord& block);

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_HEAP_HARDENING_H_
