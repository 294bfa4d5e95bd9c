// Tests that a sanitizer cannot run, or runs less often because it finds nothing there.

#ifndef PINION_TESTS_SUPPORT_SANITIZERS_H_
#define PINION_TESTS_SUPPORT_SANITIZERS_H_

#include "absl/base/config.h"

namespace pinion::testing {

// Returns the rounds for code without threads: a fifth under ThreadSanitizer, which is thirty times
// slower and cannot find a race there; half under AddressSanitizer.
constexpr int RoundsWithoutThreads(int rounds) {
#if defined(ABSL_HAVE_THREAD_SANITIZER)
  return rounds / 5;
#elif defined(ABSL_HAVE_ADDRESS_SANITIZER)
  return rounds / 2;
#else
  return rounds;
#endif
}

// A child of fork() has the heap of its parent. AddressSanitizer's heap before LLVM 17 does not
// take its locks around fork(): a child whose parent has other threads may wait for them forever.
#if defined(ABSL_HAVE_ADDRESS_SANITIZER)
inline constexpr bool kForkBesideThreadsMayHang = true;
#else
inline constexpr bool kForkBesideThreadsMayHang = false;
#endif

}  // namespace pinion::testing

#endif  // PINION_TESTS_SUPPORT_SANITIZERS_H_
