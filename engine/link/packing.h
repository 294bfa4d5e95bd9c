// Plans which pieces of one offload share a block of host memory.
//
//   const PackingPlan plan = PlanPacking(sizes, link);
//   for (const PackingPlan::Group& group : plan.groups) { /* one host block, one copy back */ }
//
// Each piece of a batch costs about a microsecond of the link, and more host time if it is fetched
// by itself. Pieces whose bytes take less time than that share a block and are fetched in one copy.
// They are also offloaded in one copy, if it pays to gather them on the device first.
//
//   alone       a block of its own         fetched when it is needed
//   grouped     one block, n pieces out    fetched as a whole
//   gathered    one block, one piece out   as above; a kernel and its memory traffic on the device
//
// A group is kept until all of its pieces have been read. So large pieces, which gain little from
// sharing, stay alone. Pure functions.

#ifndef PINION_ENGINE_LINK_PACKING_H_
#define PINION_ENGINE_LINK_PACKING_H_

#include <cstddef>
#include <cstdint>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "pinion/engine/link/link_calibration.h"

namespace pinion {

// Alignment of pieces in a group. CPU kernels may choose a code path by alignment, so a fetched
// piece keeps its address modulo this.
inline constexpr uint64_t kPackAlignmentBytes = 512;

// Time to gather pieces on the device.
double GatherUs(uint64_t pieces, uint64_t size_bytes);

struct PackingPlan {
  struct Group {
    absl::InlinedVector<size_t, 1> pieces;     // by index, ascending; never empty
    absl::InlinedVector<uint64_t, 1> offsets;  // of each in the group's block
    uint64_t size_bytes = 0;                   // of the block
    bool gather = false;
  };
  // Each piece is in one group. By the first piece's index.
  absl::InlinedVector<Group, 1> groups;
};

// The largest piece that gains from a shared block; 0 if pieces cost nothing or the link is
// unknown.
uint64_t LargestSmallPiece(const LinkCalibration& link);

// Size of a batch that fills the link in either direction: fixed costs are a seventeenth of its
// time. 1 MiB for an unknown link.
uint64_t FullBatchBytes(const LinkCalibration& link);

// `sizes` are positive. By the model of link and device, the plan is never slower than all pieces
// in one batch, or one by one.
PackingPlan PlanPacking(absl::Span<const uint64_t> sizes, const LinkCalibration& link);

}  // namespace pinion

#endif  // PINION_ENGINE_LINK_PACKING_H_
