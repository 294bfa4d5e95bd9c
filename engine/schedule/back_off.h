// Skips attempts after a refusal. Each refusal doubles the number of skipped attempts, up to 1024.

#ifndef PINION_ENGINE_SCHEDULE_BACK_OFF_H_
#define PINION_ENGINE_SCHEDULE_BACK_OFF_H_

#include <algorithm>
#include <cstdint>
#include <utility>

namespace pinion {

class BackOff {
 public:
  // Whether to try now, or to skip this attempt.
  bool MayTry() {
    if (pause_ == 0) return true;
    --pause_;
    return false;
  }
  void Refused() { pause_ = std::exchange(next_pause_, std::min(2 * next_pause_, kLongestPause)); }
  void Worked() { next_pause_ = 1; }

 private:
  static constexpr uint64_t kLongestPause = 1024;

  uint64_t pause_ = 0;  // attempts to skip
  uint64_t next_pause_ = 1;
};

}  // namespace pinion

#endif  // PINION_ENGINE_SCHEDULE_BACK_OFF_H_
