// Measures when streams reach points of their work, without blocking until the times are read.
//
//   StreamClock clock(device);
//   const StreamClock::Moment before = clock.Now(stream);
//   ... work on the stream ...
//   const StreamClock::Moment after = clock.Now(stream);
//   PINION_ASSIGN_OR_RETURN(StreamClock::Times times, clock.Read({before, after}, timeout));
//   times.us[1];                                     // duration of the work
//
// A moment is a timed event plus the host time of its recording. Without the event, only the host
// time remains: the time of submission, not of completion.
//
// Thread safety: thread-safe.
// Ownership: moments keep their events and the device alive.

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
    internal::EventRef event;  // null if recording failed
    double host_us = 0;        // host's steady clock
  };
  struct Times {
    std::vector<double> us;  // each moment, relative to the first
    // True if host times are used, because a moment has no event.
    bool by_host = false;
  };

  explicit StreamClock(std::shared_ptr<Device> device);

  // Returns the moment behind the stream's present work. Never blocks and never fails.
  Moment Now(StreamHandle stream);

  // Like Device::IsCapturing. Events recorded during a capture cannot be read.
  absl::StatusOr<bool> IsCapturing(StreamHandle stream);

  // Blocks until the streams have reached all moments. DeadlineExceeded after `timeout`, or a
  // device error.
  absl::StatusOr<Times> Read(absl::Span<const Moment> moments, absl::Duration timeout);

 private:
  const std::shared_ptr<internal::GuardedDevice> device_;
  const std::shared_ptr<internal::EventPool> events_;
};

}  // namespace pinion

#endif  // PINION_ENGINE_STREAM_STREAM_CLOCK_H_
