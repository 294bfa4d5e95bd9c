// Tries again after a refusal, less and less often.

#ifndef PINION_ENGINE_PLAN_BACK_OFF_H_
#define PINION_ENGINE_PLAN_BACK_OFF_H_

#include <cstdint>
#include <utility>

namespace pinion {

class BackOff {
 public:
  // Whether to try now, or to leave this attempt out.
  bool MayTry() {
    if (pause_ == 0) return true;
    --pause_;
    return false;
  }
  void Refused() { pause_ = std::exchange(next_pause_, 2 * next_pause_); }
  void Worked() { next_pause_ = 1; }

 private:
  uint64_t pause_ = 0;  // attempts that are left out
  uint64_t next_pause_ = 1;
};

}  // namespace pinion

#endif  // PINION_ENGINE_PLAN_BACK_OFF_H_
