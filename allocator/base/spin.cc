#include "pinion/allocator/base/spin.h"

#include <algorithm>

namespace pinion {
namespace {

// How often a thread looks, and how many pauses lie before the first look: twice as many before
// each next one, up to the most. Most holders of a lock are soon done. Who is not does dozens of
// allocations with what is in its cache, in the time that the first one takes on another processor.
constexpr int kLooks = 20;
constexpr int kFirstPauses = 4;
constexpr int kMostPauses = 80;

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

}  // namespace

bool Spin::Again() {
  if (looks_++ == kLooks) return false;
  pauses_ = pauses_ == 0 ? kFirstPauses : std::min(2 * pauses_, kMostPauses);
  for (int i = 0; i < pauses_; ++i) Pause();
  return true;
}

}  // namespace pinion
