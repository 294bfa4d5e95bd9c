// Detects misuse of blocks and names the block. Every build detects a double release. Hardened
// builds (--//config:hardening, all sanitizer configurations) also have red zones behind blocks,
// and a pattern in free memory.
//
// Devices write without a sanitizer's checks. So hardening finds what AddressSanitizer cannot: a
// copy that is longer than its block, or that still runs when the block is freed. Reads are not
// detected, but return a pattern. Free memory and unwritten bytes have kFreePattern (-6e32 as a
// float), and red zones have kRedZonePattern.
//
// Thread safety: thread-safe for different blocks.

#ifndef PINION_ALLOCATOR_HEAP_HARDENING_H_
#define PINION_ALLOCATOR_HEAP_HARDENING_H_

#include <cstdint>

#include "pinion/allocator/heap/block_records.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/config/build_config.h"

namespace pinion::internal {

using config::kHardened;

inline constexpr unsigned char kFreePattern = 0xF5;
inline constexpr unsigned char kRedZonePattern = 0xBD;

// Bytes that are added to each request for a red zone. The bytes of rounding belong to the zone
// too.
inline constexpr uint64_t kRedZoneBytes = kHardened ? 64 : 0;

// Dies, reporting that the block with this id was released before. CheckReleased dies unless
// `block` still has this id and state.
void DieOfRelease(const BlockRecord& block, uint64_t id);
inline void CheckReleased(const BlockRecord& block, uint64_t id, BlockState state) {
  if (block.id != id || block.state != state) [[unlikely]]
    DieOfRelease(block, id);
}

// --- Hardened builds only ---

// Fills free memory with the pattern.
void PoisonFree(void* data, uint64_t size_bytes);

// Dies if free memory that is about to be unpinned was written to.
void CheckFreeSegment(const HostSegment& segment);

// Dies if the newly allocated `block` was written to while it was free. Then marks its red zone.
void PrepareBlock(const BlockRecord& block);

// Dies if the red zone was written to. Then fills the block with the pattern.
void CheckAndPoisonBlock(const BlockRecord& block);

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_HEAP_HARDENING_H_
