// Merges the pieces of a copy that are adjacent on both sides.
//
// A copy costs 2 to 7 us of the host's time and about as much of the link's, so two neighbours in
// one piece are cheaper than two pieces. A pure function.

#ifndef PINION_ENGINE_COALESCE_H_
#define PINION_ENGINE_COALESCE_H_

#include <vector>

#include "absl/types/span.h"
#include "pinion/device/device.h"

namespace pinion {

// Copies the same bytes to the same places with as few pieces as merging of neighbours can give,
// by ascending destination. The pieces' destinations must not overlap.
std::vector<CopyPiece> CoalescePieces(absl::Span<const CopyPiece> pieces);

}  // namespace pinion

#endif  // PINION_ENGINE_COALESCE_H_
