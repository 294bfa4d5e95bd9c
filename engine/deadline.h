// What is left of a timeout, by a clock that nobody sets.

#ifndef PINION_ENGINE_DEADLINE_H_
#define PINION_ENGINE_DEADLINE_H_

#include <algorithm>
#include <chrono>

#include "absl/time/time.h"

namespace pinion::internal {

class Deadline {
 public:
  explicit Deadline(absl::Duration timeout) : timeout_(timeout) {}

  // From `timeout` down to zero.
  absl::Duration Left() const {
    const absl::Duration elapsed = absl::FromChrono(std::chrono::steady_clock::now() - start_);
    return std::max(timeout_ - elapsed, absl::ZeroDuration());
  }

 private:
  const absl::Duration timeout_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace pinion::internal

#endif  // PINION_ENGINE_DEADLINE_H_
