// Cost of copies on a link, as a line: a fixed cost and a bandwidth.
//
//   copy    fixed_us + bytes / bandwidth
//   batch   fixed_us + (pieces - 1) * piece_us + bytes / bandwidth
//
// GB/s are 1e9 bytes per second, as nvbandwidth prints them. Pure functions.

#ifndef PINION_ENGINE_LINK_LINK_CURVE_H_
#define PINION_ENGINE_LINK_LINK_CURVE_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace pinion {

struct LinkCurve {
  double fixed_us = 0;  // of a copy in a queue of copies
  double piece_us = 0;  // of each further piece of a batch
  double gb_per_s = 0;  // of large copies; 0: not measured

  // The size at which a copy reaches half of the bandwidth.
  double HalfPerformanceBytes() const { return fixed_us * gb_per_s * 1e3; }
  double CopyUs(uint64_t size_bytes) const { return BatchUs(1, size_bytes); }
  // `size_bytes` of all pieces together; pieces >= 1.
  double BatchUs(uint64_t pieces, uint64_t size_bytes) const {
    return fixed_us + static_cast<double>(pieces - 1) * piece_us +
           static_cast<double>(size_bytes) / (gb_per_s * 1e3);
  }
  // The bandwidth that a copy of this size reaches.
  double CopyGbPerS(uint64_t size_bytes) const {
    return static_cast<double>(size_bytes) / (CopyUs(size_bytes) * 1e3);
  }
};

// One copy of `size_bytes` took `us`.
struct CopyTime {
  uint64_t size_bytes = 0;
  double us = 0;
};

// Fits the line with the least sum of squared *relative* errors, so that small copies count as much
// as large ones. The fixed cost is never negative; piece_us stays 0. InvalidArgument if there are
// fewer than two sizes, if a time is not positive, or if times shrink with the size.
absl::StatusOr<LinkCurve> FitLinkCurve(absl::Span<const CopyTime> times);

}  // namespace pinion

#endif  // PINION_ENGINE_LINK_LINK_CURVE_H_
