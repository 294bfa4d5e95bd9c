#include "pinion/engine/coalesce.h"

#include <algorithm>
#include <functional>

#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"

namespace pinion {
namespace {

constexpr uint64_t kCutAlignmentBytes = 4 * kKiB;

bool ByDestination(const CopyPiece& a, const CopyPiece& b) {
  return std::less<const void*>()(a.dst, b.dst);
}

// Returns where to end a cut, in bytes from the beginning of its piece.
uint64_t AlignedCut(uint64_t end_bytes) { return end_bytes - end_bytes % kCutAlignmentBytes; }

const void* End(const void* data, uint64_t size_bytes) {
  return static_cast<const char*>(data) + size_bytes;
}

CopyPiece PartOf(const CopyPiece& piece, uint64_t begin_bytes, uint64_t size_bytes) {
  return {static_cast<char*>(piece.dst) + begin_bytes,
          static_cast<const char*>(piece.src) + begin_bytes, size_bytes};
}

}  // namespace

CopyPieces SortPieces(absl::Span<const CopyPiece> pieces) {
  CopyPieces sorted(pieces.begin(), pieces.end());
  std::sort(sorted.begin(), sorted.end(), ByDestination);
  return sorted;
}

CopyPieces CoalescePieces(absl::Span<const CopyPiece> pieces, HostBlocks host_blocks) {
  CopyPieces merged = SortPieces(pieces);
  std::sort(host_blocks.begin(), host_blocks.end(), std::less<>());
  const auto begins_block = [&host_blocks](const void* data) {
    return std::binary_search(host_blocks.begin(), host_blocks.end(), data, std::less<>());
  };
  size_t last = 0;
  for (size_t i = 1; i < merged.size(); ++i) {
    const CopyPiece piece = merged[i];
    if (End(merged[last].dst, merged[last].size_bytes) == piece.dst &&
        End(merged[last].src, merged[last].size_bytes) == piece.src && !begins_block(piece.dst) &&
        !begins_block(piece.src)) {
      merged[last].size_bytes += piece.size_bytes;
    } else {
      merged[++last] = piece;
    }
  }
  if (!merged.empty()) merged.resize(last + 1);
  return merged;
}

CopyPieces SlicePieces(absl::Span<const CopyPiece> pieces, uint64_t begin_bytes,
                       uint64_t max_bytes) {
  PINION_CHECK(begin_bytes < TotalBytes(pieces) && max_bytes > 0) << "an empty slice";
  CopyPieces slice;
  for (const CopyPiece& piece : pieces) {
    if (piece.size_bytes <= begin_bytes) {
      begin_bytes -= piece.size_bytes;
      continue;
    }
    const uint64_t size_bytes = piece.size_bytes - begin_bytes;
    if (size_bytes > max_bytes) {
      const uint64_t aligned_end = AlignedCut(begin_bytes + max_bytes);
      if (aligned_end > begin_bytes) {
        slice.push_back(PartOf(piece, begin_bytes, aligned_end - begin_bytes));
      } else if (slice.empty()) {
        slice.push_back(PartOf(piece, begin_bytes, max_bytes));
      }
      break;
    }
    slice.push_back(PartOf(piece, begin_bytes, size_bytes));
    max_bytes -= size_bytes;
    begin_bytes = 0;
  }
  return slice;
}

uint64_t TotalBytes(absl::Span<const CopyPiece> pieces) {
  uint64_t total = 0;
  for (const CopyPiece& piece : pieces) total += piece.size_bytes;
  return total;
}

}  // namespace pinion
