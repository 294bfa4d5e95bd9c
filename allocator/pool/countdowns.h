// Counts down an arena's allocations until it reclaims blocks or looks around. The owner's fast
// path counts with one subtraction.
//
//   if (left.HasAtOnce()) left.CountAtOnce();         // the fast path
//   else if (left.IsReclaimDue()) ...                 // Begin, look around if it says so, End
//   else left.Count();
//
// Thread safety: none; guarded by the arena's lock.

#ifndef PINION_ALLOCATOR_POOL_COUNTDOWNS_H_
#define PINION_ALLOCATOR_POOL_COUNTDOWNS_H_

#include <algorithm>
#include <cstdint>
#include <utility>

namespace pinion::internal {

class Countdowns {
 public:
  // Allocations that may take the fast path.
  bool HasAtOnce() const { return at_once_ > 0; }
  void CountAtOnce() { --at_once_; }
  // Lets all allocations until the next reclaim take the fast path.
  void MakeAllAtOnce() { at_once_ = std::exchange(until_reclaim_, 0); }
  // Takes back the fast-path allocations that were not made.
  void TakeBack() { until_reclaim_ += std::exchange(at_once_, 0); }

  bool IsReclaimDue() const { return until_reclaim_ == 0; }
  void Count() { --until_reclaim_; }
  // Makes a reclaim due within kReclaimEvery allocations.
  void ReclaimSoon() {
    TakeBack();
    const uint32_t soon = std::min(until_reclaim_, kReclaimEvery - 1);
    until_look_around_ += until_reclaim_ - soon;
    until_reclaim_ = soon;
  }

  // Begins a reclaim, due or not. Returns whether the arena must look around first.
  bool BeginReclaim() {
    TakeBack();
    until_look_around_ += std::exchange(until_reclaim_, 0);
    if (until_look_around_ > 0) return false;
    until_look_around_ = kLookAroundEvery;
    return true;
  }
  // Call after looking around. Returns whether all arenas must be reclaimed too.
  bool OnLookAround() {
    const bool at_all = until_look_at_all_ == 0;
    until_look_at_all_ = at_all ? kLookAtAllEvery - 1 : until_look_at_all_ - 1;
    return at_all;
  }
  // Ends a reclaim. `some_wait` tells whether blocks still wait.
  void EndReclaim(bool some_wait) {
    const uint32_t calls =
        some_wait ? std::min(kReclaimEvery, until_look_around_) : until_look_around_;
    until_look_around_ -= calls;
    until_reclaim_ = calls - 1;
  }

 private:
  // Allocations between two reclaims while blocks wait. Each reads a counter that is in another
  // processor's cache.
  static constexpr uint32_t kReclaimEvery = 4;
  // Allocations between two looks into the buffers of all threads.
  static constexpr uint32_t kLookAroundEvery = 256;
  // Looks around until all arenas are reclaimed too.
  static constexpr uint32_t kLookAtAllEvery = 64;

  uint32_t at_once_ = 0;
  uint32_t until_reclaim_ = 0;      // after those of the fast path
  uint32_t until_look_around_ = 0;  // after the next reclaim
  uint32_t until_look_at_all_ = 0;  // in looks around
};

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_POOL_COUNTDOWNS_H_
