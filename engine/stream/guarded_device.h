// A device whose calls are made again when they fail for the moment, and never again once it has
// failed for good.
//
// A call that returns Unavailable has done nothing (device.h: copies are all or nothing, the rest
// is idempotent), so it is repeated at once, a few times. The retry policy of the whole library is
// here.
//
// The first sticky error (device.h) poisons it: from then on every call returns that
// error, with the name of the call that failed first, and reaches no device. The same goes for a
// process that is exiting, or that is a fork of the one that opened the device: accelerators do
// not survive fork.
//
// Thread safety: thread-safe. Calls that are already running when the device is poisoned finish.

#ifndef PINION_ENGINE_STREAM_GUARDED_DEVICE_H_
#define PINION_ENGINE_STREAM_GUARDED_DEVICE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "pinion/allocator/base/fork_origin.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/fence.h"
#include "pinion/device/device.h"
#include "pinion/device/process_exit.h"

namespace pinion::internal {

class GuardedDevice {
 public:
  // `transient_retries`: how often a call that fails for the moment is made again.
  GuardedDevice(std::shared_ptr<Device> device, int transient_retries);
  GuardedDevice(const GuardedDevice&) = delete;
  GuardedDevice& operator=(const GuardedDevice&) = delete;

  Device& device() const { return *device_; }

  // Whether calls are made, and OkStatus, or why not.
  bool healthy() const {
    return !poisoned_.load(std::memory_order_acquire) && !ProcessIsExiting() &&
           !origin_.InForkedChild();
  }
  absl::Status health() const { return healthy() ? absl::OkStatus() : WhyUnhealthy(); }

  // health(), or that the engine was shut down. The calls below go on after that, so that what is
  // in flight can be waited for.
  absl::Status accepting() const {
    return healthy() && accepting_.load(std::memory_order_acquire) ? absl::OkStatus()
                                                                   : WhyNotAccepting();
  }
  void StopAccepting() { accepting_.store(false, std::memory_order_release); }

  // FailedPrecondition while `stream` captures a graph. A stream that waited for a capturing one
  // would be drawn into the capture, and a captured wait for outside work breaks it.
  absl::Status CheckNotCapturing(StreamHandle stream);

  // `call` is what the message says has failed. The first one counts.
  void Poison(const char* call, absl::string_view why);
  // The same, if `status`, of a call, is sticky: then returns health(), else OkStatus.
  absl::Status PoisonIfSticky(const char* call, const absl::Status& status);

  // As in device.h.
  absl::StatusOr<StreamHandle> CreateStream(const std::string& name);
  absl::Status DestroyStream(StreamHandle stream);
  absl::Status SynchronizeStream(StreamHandle stream);
  absl::StatusOr<bool> IsCapturing(StreamHandle stream);
  absl::StatusOr<EventHandle> CreateEvent();
  absl::StatusOr<EventHandle> CreateTimedEvent();
  absl::Status DestroyEvent(EventHandle event);
  absl::Status RecordEvent(EventHandle event, StreamHandle stream);
  absl::Status StreamWaitEvent(StreamHandle stream, EventHandle event);
  absl::StatusOr<bool> QueryEvent(EventHandle event);
  absl::Status WaitEvent(EventHandle event, absl::Duration timeout);
  absl::StatusOr<double> ElapsedMs(EventHandle start, EventHandle end);
  absl::Status CopyAsync(CopyDirection direction, absl::Span<const CopyPiece> pieces,
                         StreamHandle stream);

  // Later work of `stream`, which does not capture, starts after number `value` of `timeline`, by
  // an event. Unimplemented where the timeline has none.
  absl::Status StreamWaitTicket(StreamHandle stream, FenceTimeline& timeline, uint64_t value);

  // Calls that were made again.
  uint64_t transient_retries() const { return retries_.load(std::memory_order_relaxed); }
  // Stream waits that were enqueued, and those that were not needed, since the work was done.
  uint64_t event_waits() const { return event_waits_.load(std::memory_order_relaxed); }
  uint64_t event_waits_skipped() const {
    return event_waits_skipped_.load(std::memory_order_relaxed);
  }
  void CountSkippedWait() { event_waits_skipped_.fetch_add(1, std::memory_order_relaxed); }

 private:
  absl::Status WhyUnhealthy() const;
  absl::Status WhyNotAccepting() const;
  template <typename Result, typename Call>
  Result Guard(const char* name, const Call& call);

  const std::shared_ptr<Device> device_;
  const int max_transient_retries_;
  const ForkOrigin origin_;
  std::atomic<bool> accepting_{true};
  std::atomic<bool> poisoned_{false};  // first_error_ is an error: all is well without its lock
  // Apart from what each call reads, since waits are counted all the time.
  alignas(64) std::atomic<uint64_t> retries_{0};
  std::atomic<uint64_t> event_waits_{0};
  std::atomic<uint64_t> event_waits_skipped_{0};
  mutable Mutex mu_;
  absl::Status first_error_ ABSL_GUARDED_BY(mu_);
};

}  // namespace pinion::internal

#endif  // PINION_ENGINE_STREAM_GUARDED_DEVICE_H_
