#include "pinion/device/cuda/poll_until.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "absl/time/clock.h"
#include "pinion/allocator/base/status_macros.h"

namespace pinion {
namespace {

constexpr absl::Duration kSpin = absl::Microseconds(50);
constexpr int kPartOfElapsed = 50;
constexpr absl::Duration kTimerSlack = absl::Microseconds(50);
constexpr absl::Duration kLongestSleep = absl::Milliseconds(1);

class SteadyClock final : public PollClock {
 public:
  absl::Duration Now() override {
    return absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
  }
  void Yield() override { std::this_thread::yield(); }
  void Sleep(absl::Duration duration) override { absl::SleepFor(duration); }
};

}  // namespace

PollClock& SteadyPollClock() {
  static SteadyClock clock;
  return clock;
}

absl::StatusOr<bool> PollUntil(absl::FunctionRef<absl::StatusOr<bool>()> done,
                               absl::Duration timeout, PollClock& clock) {
  const absl::Duration start = clock.Now();
  while (true) {
    PINION_ASSIGN_OR_RETURN(const bool is_done, done());
    if (is_done) return true;
    const absl::Duration elapsed = clock.Now() - start;
    if (elapsed >= timeout) return false;
    if (elapsed < kSpin) continue;
    const absl::Duration sleep = elapsed / kPartOfElapsed - kTimerSlack;
    if (sleep <= absl::ZeroDuration()) {
      clock.Yield();
    } else {
      clock.Sleep(std::min({sleep, kLongestSleep, timeout - elapsed}));
    }
  }
}

}  // namespace pinion
