#include "pinion/engine/coalesce.h"

#include <algorithm>
#include <functional>

namespace pinion {
namespace {

const void* End(const void* data, uint64_t size_bytes) {
  return static_cast<const char*>(data) + size_bytes;
}

}  // namespace

std::vector<CopyPiece> CoalescePieces(absl::Span<const CopyPiece> pieces) {
  std::vector<CopyPiece> sorted(pieces.begin(), pieces.end());
  std::sort(sorted.begin(), sorted.end(), [](const CopyPiece& a, const CopyPiece& b) {
    return std::less<const void*>()(a.dst, b.dst);
  });
  std::vector<CopyPiece> merged;
  for (const CopyPiece& piece : sorted) {
    if (!merged.empty()) {
      CopyPiece& last = merged.back();
      if (End(last.dst, last.size_bytes) == piece.dst &&
          End(last.src, last.size_bytes) == piece.src) {
        last.size_bytes += piece.size_bytes;
        continue;
      }
    }
    merged.push_back(piece);
  }
  return merged;
}

}  // namespace pinion
