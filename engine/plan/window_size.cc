#include "pinion/engine/plan/window_size.h"

#include <algorithm>
#include <utility>

#include "pinion/allocator/base/bytes.h"

namespace pinion {
namespace {

// What a sixteenth of the last scope is at most. Two tensors of the usual size fit, however large.
constexpr uint64_t kMostOfAScope = 256 * kMiB;

// Two batches of small tensors fit into so much. It is at most this part of the last scope: what
// saves little is to leave as well.
constexpr uint64_t kLeastBytes = 64 * kKiB;
constexpr uint64_t kLeastPart = 6;

}  // namespace

bool ScopeSizes::Add(uint64_t size_bytes) {
  total_bytes_ += size_bytes;
  if (size_bytes <= largest_.back()) return false;
  largest_.back() = size_bytes;
  for (size_t i = largest_.size() - 1; i > 0 && largest_[i - 1] < largest_[i]; --i) {
    std::swap(largest_[i - 1], largest_[i]);
  }
  return true;
}

uint64_t ScopeSizes::usual_bytes() const {
  for (size_t i = largest_.size(); i > 0; --i) {
    if (largest_[i - 1] > 0) return largest_[i - 1];
  }
  return 0;
}

uint64_t AutoWindowBytes(const ScopeSizes& now, const ScopeSizes& last) {
  return std::max({2 * std::max(now.usual_bytes(), last.usual_bytes()),
                   std::min(kMostOfAScope, last.total_bytes() / 16),
                   std::min(kLeastBytes, last.total_bytes() / kLeastPart)});
}

}  // namespace pinion
