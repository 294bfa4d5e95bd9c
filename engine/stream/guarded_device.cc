#include "pinion/engine/stream/guarded_device.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/engine/stream/stream_in_use.h"

namespace pinion::internal {

GuardedDevice::GuardedDevice(std::shared_ptr<Device> device, int transient_retries)
    : device_(std::move(device)), max_transient_retries_(transient_retries) {
  PINION_CHECK(device_ != nullptr) << "an engine needs a device";
}

absl::Status GuardedDevice::WhyUnhealthy() const {
  if (ProcessIsExiting()) {
    return absl::FailedPreconditionError(
        absl::StrCat(device_->name(), ": the process is exiting; no device call is made"));
  }
  if (origin_.InForkedChild()) return origin_.Refusal(device_->name());
  // Last: a child of fork() may find the lock taken for ever.
  MutexLock lock(mu_);
  return first_error_;
}

absl::Status GuardedDevice::WhyNotAccepting() const {
  PINION_RETURN_IF_ERROR(health());
  return absl::FailedPreconditionError(
      absl::StrCat(device_->name(), ": the transfer engine was shut down; create another one"));
}

absl::Status GuardedDevice::CheckNotCapturing(StreamHandle stream) {
  PINION_ASSIGN_OR_RETURN(const bool capturing, IsCapturing(stream));
  if (!capturing) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(device_->name(), ": a stream captures a graph; transfers can follow it, and it ",
                   "can wait for other streams, only after the capture has ended"));
}

void GuardedDevice::Poison(const char* call, absl::string_view why) {
  const absl::Status error = absl::InternalError(absl::StrCat(
      device_->name(), " failed for good at ", call, ": ", why,
      " (its engine makes no further device call; copies in flight count as never done; restart "
      "the process to use the device again)"));
  {
    MutexLock lock(mu_);
    if (!first_error_.ok()) return;
    first_error_ = error;
    poisoned_.store(true, std::memory_order_release);
  }
  PINION_LOG(kError) << error.message();
}

absl::Status GuardedDevice::PoisonIfSticky(const char* call, const absl::Status& status) {
  if (!IsSticky(status)) return absl::OkStatus();
  Poison(call, status.message());
  return health();
}

absl::StatusOr<bool> GuardedDevice::IsCapturing(StreamHandle stream) {
  if (StreamInUse::IsKnownNotToCapture(*device_, stream)) return false;
  absl::StatusOr<bool> capturing = Guard("IsCapturing", &Device::IsCapturing, stream);
  if (capturing.ok() && !*capturing) StreamInUse::NoteNotCapturing(*device_, stream);
  return capturing;
}

absl::Status GuardedDevice::StreamWaitEvent(StreamHandle stream, EventHandle event) {
  absl::Status waited = Guard("StreamWaitEvent", &Device::StreamWaitEvent, stream, event);
  if (waited.ok()) event_waits_.fetch_add(1, std::memory_order_relaxed);
  return waited;
}

absl::Status GuardedDevice::StreamWaitTicket(StreamHandle stream, FenceTimeline& timeline,
                                             uint64_t value) {
  struct Waiter final : EventWaiter {
    Waiter(GuardedDevice& on, StreamHandle waiting) : device(on), stream(waiting) {}
    absl::Status WaitForEvent(void* event) override {
      asked = true;
      return device.StreamWaitEvent(stream, EventHandle(event));
    }
    GuardedDevice& device;
    const StreamHandle stream;
    bool asked = false;
  } waiter(*this, stream);
  PINION_RETURN_IF_ERROR(timeline.OrderAfter(value, waiter));
  if (!waiter.asked) CountSkippedWait();
  return absl::OkStatus();
}

}  // namespace pinion::internal
