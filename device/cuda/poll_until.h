// How the host waits for what can only be asked for: CUDA waits for an event with no timeout.
//
// Asking goes on without a pause at first, then with pauses that grow with what has elapsed, so
// that a wait takes at most about 2 % longer than what it waits for. A thread that sleeps is late
// by the kernel's timer slack (50 us by default): while 2 % is less than that, the thread yields
// instead.
//
// Thread safety: PollUntil has no state; the real clock is thread-safe.

#ifndef PINION_DEVICE_CUDA_POLL_UNTIL_H_
#define PINION_DEVICE_CUDA_POLL_UNTIL_H_

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace pinion {

// A clock that nobody sets, and ways to let it run.
class PollClock {
 public:
  virtual ~PollClock() = default;
  virtual absl::Duration Now() = 0;  // since some moment in the past
  virtual void Yield() = 0;
  virtual void Sleep(absl::Duration duration) = 0;
};

PollClock& SteadyPollClock();

// Asks `done` until it says true or an error, or until `timeout` has passed: false. It is asked
// once at least.
absl::StatusOr<bool> PollUntil(absl::FunctionRef<absl::StatusOr<bool>()> done,
                               absl::Duration timeout, PollClock& clock = SteadyPollClock());

}  // namespace pinion

#endif  // PINION_DEVICE_CUDA_POLL_UNTIL_H_
