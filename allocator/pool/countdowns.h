// How many allocations an arena still makes before something is due. Each is counted once, and most
// of them by the owner's thread with one subtraction.
//
//   if (left.HasAtOnce()) left.CountAtOnce();         // the owner does no more than to allocate
//   else if (left.IsReclaimDue()) ...                 // Begin, look around if it says so, End
//   else left.Count();
//
// Thread safety: none; the arena's lock guards it.

#ifndef PINION_ALLOCATOR_POOL_COUNTDOWNS_H_
#define PINION_ALLOCATOR_POOL_COUNTDOWNS_H_

#include <algorithm>
#include <cstdint>
#include <utility>

namespace pinion::internal {

class Countdowns {
 public:
  // Allocations that the owner makes before it does more than to allocate.
  bool HasAtOnce() const { return at_once_ > 0; }
  void CountAtOnce() { --at_once_; }
  // All that are left until it reclaims are at once.
  void MakeAllAtOnce() { at_once_ = std::exchange(until_reclaim_, 0); }
  // What the owner has not allocated at once counts as left until it reclaims.
  void TakeBack() { until_reclaim_ += std::exchange(at_once_, 0); }

  bool IsReclaimDue() const { return until_reclaim_ == 0; }
  void Count() { --until_reclaim_; }
  // At the latest in kReclaimEvery allocations.
  void ReclaimSoon() {
    TakeBack();
    const uint32_t soon = std::min(until_reclaim_, kReclaimEvery - 1);
    until_look_around_ += until_reclaim_ - soon;
    until_reclaim_ = soon;
  }

  // The arena reclaims now, whatever is left. True if it is to look around before.
  bool BeginReclaim() {
    TakeBack();
    until_look_around_ += std::exchange(until_reclaim_, 0);
    if (until_look_around_ > 0) return false;
    until_look_around_ = kLookAroundEvery;
    return true;
  }
  // It has looked around. True if all arenas are to be looked at as well.
  bool OnLookAround() {
    const bool at_all = until_look_at_all_ == 0;
    until_look_at_all_ = at_all ? kLookAtAllEvery - 1 : until_look_at_all_ - 1;
    return at_all;
  }
  // It has reclaimed, and some blocks still wait for something, or none does.
  void EndReclaim(bool some_wait) {
    const uint32_t calls =
        some_wait ? std::min(kReclaimEvery, until_look_around_) : until_look_around_;
    until_look_around_ -= calls;
    until_reclaim_ = calls - 1;
  }

 private:
  // Deferred blocks are looked at by every so many allocations: the counter that says which are
  // done is in the cache of the thread that raises it.
  static constexpr uint32_t kReclaimEvery = 4;
  // By how many allocations the buffers of all threads are looked into.
  static constexpr uint32_t kLookAroundEvery = 256;
  // Every so many times, those of all arenas are looked into as well.
  static constexpr uint32_t kLookAtAllEvery = 64;

  uint32_t at_once_ = 0;
  uint32_t until_reclaim_ = 0;      // after those at once
  uint32_t until_look_around_ = 0;  // from then on
  uint32_t until_look_at_all_ = 0;  // times that it looked around
};

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_POOL_COUNTDOWNS_H_
