// How large the automatic windows are, from what scopes saved. Pure functions.
//
// A window holds two tensors of the usual size, so that one can be copied while the next is
// computed, or a sixteenth of what a scope saves, if that is more; of a small scope a sixth, up to
// 64 KiB, so that small tensors travel in company. The few that are larger than all
// others (the logits of a language model) do not make it larger: each counts as half of it, so that
// two of them fit, stays until so much more was saved, and goes.

#ifndef PINION_ENGINE_PLAN_WINDOW_SIZE_H_
#define PINION_ENGINE_PLAN_WINDOW_SIZE_H_

#include <array>
#include <cstddef>
#include <cstdint>

namespace pinion {

// What was saved in a scope.
class ScopeSizes {
 public:
  // So many tensors of a scope may be larger than the usual size.
  static constexpr size_t kOutliers = 3;

  // False: usual_bytes() is as before.
  bool Add(uint64_t size_bytes);

  uint64_t total_bytes() const { return total_bytes_; }
  // Of the largest tensor but for the outliers; of the smallest one where there are no more.
  uint64_t usual_bytes() const;

 private:
  uint64_t total_bytes_ = 0;
  std::array<uint64_t, kOutliers + 1> largest_{};  // falling; 0: fewer were saved
};

// Of a scope that has saved `now`, after one that saved `last`.
uint64_t AutoWindowBytes(const ScopeSizes& now, const ScopeSizes& last);

}  // namespace pinion

#endif  // PINION_ENGINE_PLAN_WINDOW_SIZE_H_
