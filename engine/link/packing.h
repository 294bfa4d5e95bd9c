// Which of the pieces that leave a device together share one block of host memory.
//
//   const PackingPlan plan = PlanPacking(sizes, link);
//   for (const PackingPlan::Group& group : plan.groups) { /* one host block, one copy back */ }
//
// Each piece of a copy costs about a microsecond of the link, and more of the host when it comes
// back by itself. Pieces whose own bytes take less time than that share a block: they come back in
// one copy. They leave in one copy, too, if it pays to gather them on the device first.
//
//   alone       a block of its own         comes back when it is needed
//   grouped     one block, n pieces out    comes back as a whole
//   gathered    one block, one piece out   as above; a kernel and its memory traffic on the device
//
// What a group loses is granularity: it is held until all of it has been read, so large pieces,
// which gain little, stay alone. Pure functions.

#ifndef PINION_ENGINE_LINK_PACKING_H_
#define PINION_ENGINE_LINK_PACKING_H_

#include <cstddef>
#include <cstdint>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "pinion/engine/link/link_calibration.h"

namespace pinion {

// Pieces begin at multiples of this in a group. CPU kernels may choose a code path by alignment:
// what comes back keeps its address modulo this.
inline constexpr uint64_t kPackAlignmentBytes = 512;

// What it costs to gather pieces on the device.
struct GatherCost {
  // Of one kernel that copies many pieces: what it takes of a compute stream and of the host.
  double launch_us = 5;
  // LibTorch passes the pieces' addresses as kernel arguments: so many fit into one launch.
  uint64_t pieces_per_launch = 64;
  // Of device memory; every byte is read and written. A low figure for an accelerator.
  double memory_gb_per_s = 500;

  double GatherUs(uint64_t pieces, uint64_t size_bytes) const;
};

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

// The largest piece that gains from company; 0 if pieces cost nothing or the link is unknown.
uint64_t LargestSmallPiece(const LinkCalibration& link);

// A batch of so many bytes fills the link in either direction: fixed costs are a seventeenth of its
// time. 1 MiB for a link that is unknown.
uint64_t FullBatchBytes(const LinkCalibration& link);

// `sizes` are positive. By the times of link and device, out and back, the plan is never slower
// than all pieces in one batch, or one by one.
PackingPlan PlanPacking(absl::Span<const uint64_t> sizes, const LinkCalibration& link,
                        const GatherCost& gather = {});

}  // namespace pinion

#endif  // PINION_ENGINE_LINK_PACKING_H_
