// Wraps a Device: retries transient errors, and stops calling the device after a sticky error.
//
//   auto device = std::make_shared<GuardedDevice>(raw_device, /*transient_retries=*/2);
//   PINION_RETURN_IF_ERROR(device->RecordEvent(event, stream));
//
// A call that returned Unavailable has had no effect (device.h), so it is repeated at once. The
// first sticky error poisons the device: every later call returns that error, with the name of the
// failed call, and makes no device call. Calls are also refused while the process exits, and in a
// child of fork(), because accelerators do not survive fork.
//
// Thread safety: thread-safe. Calls that run while the device is poisoned finish normally.

#ifndef PINION_ENGINE_STREAM_GUARDED_DEVICE_H_
#define PINION_ENGINE_STREAM_GUARDED_DEVICE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "pinion/allocator/base/fork_origin.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/allocator/fence.h"
#include "pinion/device/device.h"
#include "pinion/device/process_exit.h"

namespace pinion::internal {

class GuardedDevice {
 public:
  // `transient_retries`: the number of times that a call is repeated after Unavailable.
  GuardedDevice(std::shared_ptr<Device> device, int transient_retries);
  GuardedDevice(const GuardedDevice&) = delete;
  GuardedDevice& operator=(const GuardedDevice&) = delete;

  Device& device() const { return *device_; }

  // Return whether calls are made: as a bool, and as OkStatus or the reason why not.
  bool healthy() const {
    return !poisoned_.load(std::memory_order_acquire) && !ProcessIsExiting() &&
           !origin_.InForkedChild();
  }
  absl::Status health() const { return healthy() ? absl::OkStatus() : WhyUnhealthy(); }

  // Returns health(), or FailedPrecondition after StopAccepting. The device calls below still work
  // then, so that copies in flight can be waited for.
  absl::Status accepting() const {
    return healthy() && accepting_.load(std::memory_order_acquire) ? absl::OkStatus()
                                                                   : WhyNotAccepting();
  }
  void StopAccepting() { accepting_.store(false, std::memory_order_release); }

  // Returns FailedPrecondition while `stream` captures a graph. A stream that waits for a capturing
  // one is drawn into the capture, and a captured wait for outside work breaks it.
  absl::Status CheckNotCapturing(StreamHandle stream);

  // Poisons the device; the first call counts. `call` names the failed call in the message.
  void Poison(const char* call, absl::string_view why);
  // Poisons the device and returns health() if `status` is sticky; else returns OkStatus.
  absl::Status PoisonIfSticky(const char* call, const absl::Status& status);

  // The calls of device.h.
  absl::StatusOr<StreamHandle> CreateStream(const std::string& name) {
    return Guard("CreateStream", &Device::CreateStream, name);
  }
  absl::Status DestroyStream(StreamHandle stream) {
    return Guard("DestroyStream", &Device::DestroyStream, stream);
  }
  absl::Status SynchronizeStream(StreamHandle stream) {
    return Guard("SynchronizeStream", &Device::SynchronizeStream, stream);
  }
  absl::StatusOr<bool> IsCapturing(StreamHandle stream);
  absl::StatusOr<EventHandle> CreateEvent() { return Guard("CreateEvent", &Device::CreateEvent); }
  absl::StatusOr<EventHandle> CreateTimedEvent() {
    return Guard("CreateTimedEvent", &Device::CreateTimedEvent);
  }
  absl::Status DestroyEvent(EventHandle event) {
    return Guard("DestroyEvent", &Device::DestroyEvent, event);
  }
  absl::Status RecordEvent(EventHandle event, StreamHandle stream) {
    return Guard("RecordEvent", &Device::RecordEvent, event, stream);
  }
  absl::Status StreamWaitEvent(StreamHandle stream, EventHandle event);
  absl::StatusOr<bool> QueryEvent(EventHandle event) {
    return Guard("QueryEvent", &Device::QueryEvent, event);
  }
  absl::Status WaitEvent(EventHandle event, absl::Duration timeout) {
    return Guard("WaitEvent", &Device::WaitEvent, event, timeout);
  }
  absl::StatusOr<double> ElapsedMs(EventHandle start, EventHandle end) {
    return Guard("ElapsedMs", &Device::ElapsedMs, start, end);
  }
  absl::Status CopyAsync(CopyDirection direction, absl::Span<const CopyPiece> pieces,
                         StreamHandle stream) {
    return Guard("CopyAsync", &Device::CopyAsync, direction, pieces, stream);
  }

  // Makes later work of `stream` (not capturing) start after submission `value` of `timeline`, by
  // events. Unimplemented if the timeline has no events.
  absl::Status StreamWaitTicket(StreamHandle stream, FenceTimeline& timeline, uint64_t value);

  // Returns the number of repeated calls.
  uint64_t transient_retries() const { return retries_.load(std::memory_order_relaxed); }
  // Return the number of enqueued stream waits, and of waits skipped because the work was done.
  uint64_t event_waits() const { return event_waits_.load(std::memory_order_relaxed); }
  uint64_t event_waits_skipped() const {
    return event_waits_skipped_.load(std::memory_order_relaxed);
  }
  void CountSkippedWait() { event_waits_skipped_.fetch_add(1, std::memory_order_relaxed); }

 private:
  absl::Status WhyUnhealthy() const;
  absl::Status WhyNotAccepting() const;
  template <typename Result, typename... Parameters>
  Result Guard(const char* name, Result (Device::*call)(Parameters...),
               const std::type_identity_t<Parameters>&... arguments) {
    if (!healthy()) return WhyUnhealthy();
    Result result = (*device_.*call)(arguments...);
    if (result.ok()) return result;
    // Only Unavailable: after DeadlineExceeded the caller's time is up.
    for (int retry = 0; retry < max_transient_retries_ && absl::IsUnavailable(StatusOf(result));
         ++retry) {
      retries_.fetch_add(1, std::memory_order_relaxed);
      result = (*device_.*call)(arguments...);
    }
    PINION_RETURN_IF_ERROR(PoisonIfSticky(name, StatusOf(result)));
    return result;
  }

  const std::shared_ptr<Device> device_;
  const int max_transient_retries_;
  const ForkOrigin origin_;
  std::atomic<bool> accepting_{true};
  std::atomic<bool> poisoned_{false};  // true if first_error_ is an error; read without its lock
  // On a cache line of their own: waits are counted often, and every call reads the fields above.
  alignas(64) std::atomic<uint64_t> retries_{0};
  std::atomic<uint64_t> event_waits_{0};
  std::atomic<uint64_t> event_waits_skipped_{0};
  mutable Mutex mu_;
  absl::Status first_error_ ABSL_GUARDED_BY(mu_);
};

}  // namespace pinion::internal

#endif  // PINION_ENGINE_STREAM_GUARDED_DEVICE_H_
