#include "pinion/engine/stream/stream_clock.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "pinion/allocator/base/deadline.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/device/trace/trace_sink.h"

namespace pinion {
namespace {

// A failed event makes Read fall back to host times, so transient errors are retried.
constexpr int kTransientRetries = 3;

}  // namespace

StreamClock::StreamClock(std::shared_ptr<Device> device)
    : device_(std::make_shared<internal::GuardedDevice>(std::move(device), kTransientRetries)),
      events_(std::make_shared<internal::EventPool>(device_, internal::EventPool::Timing::kTimed)) {
}

StreamClock::Moment StreamClock::Now(StreamHandle stream) {
  Moment moment;
  moment.host_us = 1e3 * SteadyClockMs();
  absl::StatusOr<internal::EventRef> event = events_->Acquire();
  if (event.ok() && device_->RecordEvent((*event)->handle(), stream).ok()) {
    moment.event = *std::move(event);
  }
  return moment;
}

absl::StatusOr<bool> StreamClock::IsCapturing(StreamHandle stream) {
  return device_->IsCapturing(stream);
}

absl::StatusOr<StreamClock::Times> StreamClock::Read(absl::Span<const Moment> moments,
                                                     absl::Duration timeout) {
  PINION_RETURN_IF_ERROR(device_->health());
  const internal::Deadline deadline(timeout);
  Times times;
  times.by_host = std::any_of(moments.begin(), moments.end(),
                              [](const Moment& moment) { return moment.event == nullptr; });
  for (size_t i = 0; i < moments.size(); ++i) {
    const Moment& moment = moments[i];
    if (moment.event != nullptr) {
      PINION_RETURN_IF_ERROR(device_->WaitEvent(moment.event->handle(), deadline.Left()));
    }
    if (times.by_host) {
      times.us.push_back(moment.host_us - moments.front().host_us);
    } else if (i == 0) {
      times.us.push_back(0);
    } else {
      // From one moment to the next: elapsed times are floats, which are coarse over a long step.
      PINION_ASSIGN_OR_RETURN(
          const double elapsed_ms,
          device_->ElapsedMs(moments[i - 1].event->handle(), moment.event->handle()));
      times.us.push_back(times.us.back() + 1e3 * elapsed_ms);
    }
  }
  return times;
}

}  // namespace pinion
