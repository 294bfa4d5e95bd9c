// Elapsed time and the rest of a timeout, by a monotonic clock.

#ifndef PINION_ALLOCATOR_BASE_DEADLINE_H_
#define PINION_ALLOCATOR_BASE_DEADLINE_H_

#include <algorithm>
#include <chrono>

#include "absl/time/time.h"

namespace pinion::internal {

class Stopwatch {
 public:
  absl::Duration Elapsed() const {
    return absl::FromChrono(std::chrono::steady_clock::now() - start_);
  }

 private:
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

class Deadline {
 public:
  explicit Deadline(absl::Duration timeout) : timeout_(timeout) {}

  // Returns the rest of the timeout, down to zero.
  absl::Duration Left() const {
    return std::max(timeout_ - stopwatch_.Elapsed(), absl::ZeroDuration());
  }

 private:
  const absl::Duration timeout_;
  const Stopwatch stopwatch_;
};

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_BASE_DEADLINE_H_
