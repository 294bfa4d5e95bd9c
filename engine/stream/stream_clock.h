// When streams get to points of their work, told afterwards: nobody waits while they are noted.
//
//   StreamClock clock(device);
//   const StreamClock::Moment before = clock.Now(stream);
//   ... work on the stream ...
//   const StreamClock::Moment after = clock.Now(stream);
//   PINION_ASSIGN_OR_RETURN(StreamClock::Times times, clock.Read({before, after}, timeout));
//   times.us[1];                                     // how long it took
//
// A moment is a timed event, and the host's clock when it was recorded. A device that cannot time
// events has the latter alone, which tells when work was submitted, not when it was done.
//
// Thread safety: thread-safe.
// Ownership: moments keep their events, and the device.

#ifndef PINION_ENGINE_STREAM_STREAM_CLOCK_H_
#define PINION_ENGINE_STREAM_STREAM_CLOCK_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "pinion/device/device.h"
#include "pinion/engine/stream/event_pool.h"
#include "pinion/engine/stream/guarded_device.h"

namespace pinion {

class StreamClock {
 public:
  struct Moment {
    internal::EventRef event;  // null where none could be recorded
    double host_us = 0;        // of the host's steady clock
  };
  struct Times {
    std::vector<double> us;  // of each moment, since the first
    // Of the host's clock, since at least one moment has no event.
    bool by_host = false;
  };

  explicit StreamClock(std::shared_ptr<Device> device);

  // Behind the stream's present work. Never blocks and never fails.
  Moment Now(StreamHandle stream);

  // As Device::IsCapturing: an event that is recorded meanwhile cannot be read.
  absl::StatusOr<bool> IsCapturing(StreamHandle stream);

  // Blocks until the streams have got to all of the moments. DeadlineExceeded where that takes
  // longer than `timeout`; a broken device's error.
  absl::StatusOr<Times> Read(absl::Span<const Moment> moments, absl::Duration timeout);

 private:
  const std::shared_ptr<internal::GuardedDevice> device_;
  const std::shared_ptr<internal::EventPool> events_;
};

}  // namespace pinion

#endif  // PINION_ENGINE_STREAM_STREAM_CLOCK_H_
