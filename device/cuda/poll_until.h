// Waits on the host with a timeout, by polling: CUDA cannot wait for an event with a timeout.
//
//   PINION_ASSIGN_OR_RETURN(const bool is_done,
//                           PollUntil([&] { return device.QueryEvent(event); }, absl::Seconds(1)));
//
// Polls without a pause at first, then with pauses of 2 % of the elapsed time (at most 1 ms).
// Sleeping is late by the kernel's timer slack (50 us by default), so the thread yields while 2 %
// is less than that.
//
// Thread safety: PollUntil has no state; the real clock is thread-safe.

#ifndef PINION_DEVICE_CUDA_POLL_UNTIL_H_
#define PINION_DEVICE_CUDA_POLL_UNTIL_H_

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace pinion {

// A monotonic clock, and ways to let time pass.
class PollClock {
 public:
  virtual ~PollClock() = default;
  virtual absl::Duration Now() = 0;  // since an arbitrary start
  virtual void Yield() = 0;
  virtual void Sleep(absl::Duration duration) = 0;
};

PollClock& SteadyPollClock();

// Polls `done`, at least once, until it returns true or an error. Returns false after `timeout`.
absl::StatusOr<bool> PollUntil(absl::FunctionRef<absl::StatusOr<bool>()> done,
                               absl::Duration timeout, PollClock& clock = SteadyPollClock());

}  // namespace pinion

#endif  // PINION_DEVICE_CUDA_POLL_UNTIL_H_
