// What is done to the pieces of a batch before a device sees them: neighbours are merged, chunks
// are cut. Pure functions.
//
// A piece costs the host and the link about a microsecond, so two neighbours in one piece are
// cheaper than two pieces. What a batch copies is the concatenation of its pieces by ascending
// destination, whether they are merged or not: a chunk is a range of those bytes.

#ifndef PINION_ENGINE_COALESCE_H_
#define PINION_ENGINE_COALESCE_H_

#include <cstdint>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "pinion/device/device.h"

namespace pinion {

// Most batches are of one piece, in one block.
using CopyPieces = absl::InlinedVector<CopyPiece, 1>;
using HostBlocks = absl::InlinedVector<const void*, 1>;

// The same pieces by ascending destination.
CopyPieces SortPieces(absl::Span<const CopyPiece> pieces);

// Copies the same bytes to the same places with as few pieces as merging of neighbours can give,
// by ascending destination. The pieces' destinations must not overlap. `host_blocks` are the
// beginnings of the blocks that the host's side lies in: blocks are not merged with each other,
// because two that touch may be of two pinned segments, which CUDA does not copy in one piece.
CopyPieces CoalescePieces(absl::Span<const CopyPiece> pieces, HostBlocks host_blocks);

// The pieces of at most `max_bytes` bytes, and at least one, from `begin_bytes` on. A piece that
// must be cut is cut at a multiple of 4 KiB from its beginning where that leaves anything, so that
// its parts are aligned as it was. begin_bytes must lie inside, max_bytes be positive.
CopyPieces SlicePieces(absl::Span<const CopyPiece> pieces, uint64_t begin_bytes,
                       uint64_t max_bytes);

uint64_t TotalBytes(absl::Span<const CopyPiece> pieces);

}  // namespace pinion

#endif  // PINION_ENGINE_COALESCE_H_
