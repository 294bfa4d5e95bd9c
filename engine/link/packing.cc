#include "pinion/engine/link/packing.h"

#include <algorithm>
#include <optional>

#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/engine/link/link_calibration.h"

namespace pinion {
namespace {

// A piece never costs more than a copy of its own, despite noisy measurements.
double PieceUs(const LinkCurve& curve) { return std::min(curve.piece_us, curve.fixed_us); }

bool IsKnown(const LinkCalibration& link) { return link.h2d.gb_per_s > 0 && link.d2h.gb_per_s > 0; }

void Append(PackingPlan::Group& group, size_t piece, uint64_t size_bytes) {
  const uint64_t offset = AlignUp(group.size_bytes, kPackAlignmentBytes);
  group.pieces.push_back(piece);
  group.offsets.push_back(offset);
  group.size_bytes = offset + size_bytes;
}

}  // namespace

double GatherUs(uint64_t pieces, uint64_t size_bytes) {
  // Of one kernel that copies many pieces, on a compute stream and on the host.
  constexpr double kLaunchUs = 5;
  // LibTorch passes the pieces' addresses as kernel arguments, which limits a launch.
  constexpr uint64_t kPiecesPerLaunch = 64;
  // Bandwidth of device memory, a low figure. Every byte is read and written.
  constexpr double kMemoryGbPerS = 500;
  const uint64_t launches = (pieces + kPiecesPerLaunch - 1) / kPiecesPerLaunch;
  return static_cast<double>(launches) * kLaunchUs +
         2 * static_cast<double>(size_bytes) / (kMemoryGbPerS * 1e3);
}

uint64_t LargestSmallPiece(const LinkCalibration& link) {
  if (!IsKnown(link)) return 0;
  // Includes padding, which never costs more than a shared copy saves.
  const double bytes = PieceUs(link.h2d) * link.h2d.gb_per_s * 1e3;
  return static_cast<uint64_t>(bytes) / kPackAlignmentBytes * kPackAlignmentBytes;
}

uint64_t FullBatchBytes(const LinkCalibration& link) {
  if (!IsKnown(link)) return kMiB;
  return static_cast<uint64_t>(
      16 * std::max(link.h2d.HalfPerformanceBytes(), link.d2h.HalfPerformanceBytes()));
}

PackingPlan PlanPacking(absl::Span<const uint64_t> sizes, const LinkCalibration& link) {
  const uint64_t small_bytes = LargestSmallPiece(link);
  PackingPlan plan;
  std::optional<size_t> shared;  // the group of small pieces
  uint64_t shared_bytes = 0;     // without padding
  for (size_t i = 0; i < sizes.size(); ++i) {
    PINION_CHECK(sizes[i] > 0) << "piece " << i << " is empty";
    const bool small = sizes[i] <= small_bytes;
    if (small && shared.has_value()) {
      Append(plan.groups[*shared], i, sizes[i]);
    } else {
      if (small) shared = plan.groups.size();
      Append(plan.groups.emplace_back(), i, sizes[i]);
    }
    if (small) shared_bytes += sizes[i];
  }
  if (shared.has_value()) {
    PackingPlan::Group& group = plan.groups[*shared];
    const double padding_us =
        static_cast<double>(group.size_bytes - shared_bytes) / (link.d2h.gb_per_s * 1e3);
    group.gather = GatherUs(group.pieces.size(), group.size_bytes) + padding_us <
                   static_cast<double>(group.pieces.size() - 1) * PieceUs(link.d2h);
  }
  return plan;
}

}  // namespace pinion
