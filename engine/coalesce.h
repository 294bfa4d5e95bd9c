// Merges neighbouring pieces of a copy batch, and cuts large batches into chunks. Pure functions.
//
//   const CopyPieces merged = CoalescePieces(batch.pieces(), {buffer->data()});
//   const CopyPieces chunk = SlicePieces(merged, /*begin_bytes=*/0, chunk_bytes);
//
// A piece costs the host and the link about a microsecond, so merging two neighbours saves time. A
// batch copies the concatenation of its pieces by ascending destination, merged or not. A chunk is
// a range of those bytes.

#ifndef PINION_ENGINE_COALESCE_H_
#define PINION_ENGINE_COALESCE_H_

#include <cstdint>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "pinion/device/device.h"

namespace pinion {

// Most batches have one piece, in one block.
using CopyPieces = absl::InlinedVector<CopyPiece, 1>;
using HostBlocks = absl::InlinedVector<const void*, 1>;

// Returns the pieces by ascending destination.
CopyPieces SortPieces(absl::Span<const CopyPiece> pieces);

// Returns as few pieces as possible that copy the same bytes, by ascending destination.
// Destinations must not overlap. `host_blocks` are the starts of the host's blocks, which are not
// merged with each other. Two that touch may belong to two pinned segments, and CUDA copies no
// piece across segments.
CopyPieces CoalescePieces(absl::Span<const CopyPiece> pieces, HostBlocks host_blocks);

// Returns pieces for at least one and at most `max_bytes` bytes, from `begin_bytes` on. Where
// possible, a piece is cut at a multiple of 4 KiB from its beginning, so that its parts keep its
// alignment. begin_bytes must lie inside, and max_bytes be positive.
CopyPieces SlicePieces(absl::Span<const CopyPiece> pieces, uint64_t begin_bytes,
                       uint64_t max_bytes);

uint64_t TotalBytes(absl::Span<const CopyPiece> pieces);

}  // namespace pinion

#endif  // PINION_ENGINE_COALESCE_H_
