// Checks of hardened builds (--//config:hardening, every sanitizer configuration): red zones behind
// blocks, and a byte pattern in free memory.
//
// A device writes without asking a sanitizer, so these find what AddressSanitizer cannot: a copy
// that is longer than its block, or that is still running when its block is free.

#ifndef PINION_ALLOCATOR_HARDENING_H_
#define PINION_ALLOCATOR_HARDENING_H_

#include <cstdint>

#include "pinion/allocator/segment.h"
#include "pinion/config/build_config.h"

namespace pinion::internal {

using config::kHardened;

// Room that is added to each request for a red zone. What rounding adds belongs to it too.
inline constexpr uint64_t kRedZoneBytes = kHardened ? 64 : 0;

// Fills free memory with the pattern.
void PoisonFree(void* data, uint64_t size_bytes);

// Dies if `block`, just taken, was written to while it was free; then marks its red zone.
void PrepareBlock(const BlockRecord& block);

// Dies if the red zone was written to; then fills the block with the pattern.
void CheckAndPoisonBlock(const BlockRecord& block);

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_HARDENING_H_
