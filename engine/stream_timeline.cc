#include "pinion/engine/stream_timeline.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"

namespace pinion::internal {

StreamTimeline::StreamTimeline(std::shared_ptr<GuardedDevice> device, StreamHandle stream,
                               Ownership ownership, std::string name)
    : device_(std::move(device)), stream_(stream), ownership_(ownership), name_(std::move(name)) {}

StreamTimeline::~StreamTimeline() {
  if (ownership_ == Ownership::kForeign || !device_->health().ok()) return;
  Poll();
  if (const size_t pending = pending_count(); pending > 0) {
    PINION_LOG(kError) << name_ << ": leaked the stream, " << pending
                       << " submissions on it are not done";
    return;
  }
  if (absl::Status destroyed = device_->DestroyStream(stream_); !destroyed.ok()) {
    PINION_LOG(kError) << name_ << ": leaked the stream: " << destroyed.message();
  }
}

absl::StatusOr<uint64_t> StreamTimeline::Mark(EventRef event) {
  PINION_RETURN_IF_ERROR(device_->RecordEvent(event->handle(), stream_));
  MutexLock lock(mu_);
  return Append(std::move(event), 0, 0);
}

uint64_t StreamTimeline::NumberCopy(EventRef event, uint64_t size_bytes, uint64_t pieces) {
  const absl::Status recorded = device_->RecordEvent(event->handle(), stream_);
  if (recorded.ok()) {
    MutexLock lock(mu_);
    return Append(std::move(event), size_bytes, pieces);
  }
  if (!device_->SynchronizeStream(stream_).ok()) {
    device_->Poison("RecordEvent", recorded);
    return NumberLostCopy(size_bytes, pieces);
  }
  std::vector<EventRef> released;
  MutexLock lock(mu_);
  const uint64_t value = Append(nullptr, size_bytes, pieces);
  CompleteUpTo(value, released);
  return value;
}

uint64_t StreamTimeline::NumberLostCopy(uint64_t size_bytes, uint64_t pieces) {
  MutexLock lock(mu_);
  return Append(nullptr, size_bytes, pieces);
}

void StreamTimeline::CountFailedSubmit() {
  MutexLock lock(mu_);
  ++stats_.failed_submits;
}

void StreamTimeline::CountFlowControlWait() {
  MutexLock lock(mu_);
  ++stats_.flow_control_waits;
}

uint64_t StreamTimeline::NumberToWaitFor(uint64_t allowed_bytes) const {
  MutexLock lock(mu_);
  uint64_t in_flight = stats_.in_flight_bytes;
  uint64_t value = 0;
  for (const Pending& oldest : pending_) {
    if (in_flight <= allowed_bytes) break;
    in_flight -= oldest.size_bytes;
    value = oldest.value;
  }
  return value;
}

uint64_t StreamTimeline::last_number() const {
  MutexLock lock(mu_);
  return last_number_;
}

size_t StreamTimeline::pending_count() const {
  MutexLock lock(mu_);
  return pending_.size();
}

DirectionStats StreamTimeline::GetStats() const {
  MutexLock lock(mu_);
  return stats_;
}

absl::Status StreamTimeline::OrderAfter(uint64_t value, GuardedDevice& waiter,
                                        StreamHandle stream) {
  if (Completed() >= value) {
    waiter.CountSkippedWait();
    return absl::OkStatus();
  }
  // Once this device has failed the event may never be done, and the waiter would be stuck.
  PINION_RETURN_IF_ERROR(device_->health());
  const EventRef event = EventOf(value);
  if (event == nullptr) {
    return Completed() >= value ? absl::OkStatus() : device_->health();
  }
  return waiter.StreamWaitEvent(stream, event->handle());
}

absl::Status StreamTimeline::OrderAfter(uint64_t value, StreamHandle stream) {
  if (Completed() >= value) return OrderAfter(value, *device_, stream);
  PINION_ASSIGN_OR_RETURN(const bool capturing, device_->IsCapturing(stream));
  if (!capturing) return OrderAfter(value, *device_, stream);
  Poll();
  if (Completed() >= value) return OrderAfter(value, *device_, stream);
  return absl::FailedPreconditionError(
      absl::StrCat(name_, ": submission ", value, " is not done, and the stream that is to wait ",
                   "for it captures a graph; wait on the host, or after the capture has ended"));
}

void StreamTimeline::Poll() {
  // Before any lock: a child of fork may find it taken for ever.
  if (!device_->health().ok() || pending_count() == 0) return;
  // Querying an event while its stream captures a graph would break the capture.
  if (absl::StatusOr<bool> capturing = IsCapturing(); !capturing.ok() || *capturing) return;
  while (true) {
    Pending oldest;
    {
      MutexLock lock(mu_);
      if (pending_.empty()) return;
      oldest = pending_.front();
    }
    if (oldest.event == nullptr) return;
    const absl::StatusOr<bool> done = device_->QueryEvent(oldest.event->handle());
    if (!done.ok() || !*done) return;
    Complete(oldest.value);
  }
}

absl::Status StreamTimeline::Wait(uint64_t value, absl::Duration timeout) {
  if (Completed() >= value) return absl::OkStatus();
  PINION_RETURN_IF_ERROR(device_->health());
  const EventRef event = EventOf(value);
  if (event == nullptr) {
    return Completed() >= value ? absl::OkStatus() : device_->health();
  }
  PINION_ASSIGN_OR_RETURN(const bool capturing, IsCapturing());
  if (capturing) {
    return absl::FailedPreconditionError(
        absl::StrCat(name_, ": the stream captures a graph; wait after the capture has ended"));
  }
  const absl::Status waited = device_->WaitEvent(event->handle(), timeout);
  if (absl::IsDeadlineExceeded(waited)) {
    return absl::DeadlineExceededError(
        absl::StrCat(name_, ": submission ", value, " was not done after ",
                     absl::FormatDuration(timeout), " (", waited.message(), ")"));
  }
  PINION_RETURN_IF_ERROR(waited);
  Complete(value);
  return absl::OkStatus();
}

uint64_t StreamTimeline::Append(EventRef event, uint64_t size_bytes, uint64_t pieces) {
  pending_.push_back({++last_number_, std::move(event), size_bytes});
  ++stats_.submitted_transfers;
  ++stats_.submitted_chunks;
  stats_.submitted_pieces += pieces;
  stats_.submitted_bytes += size_bytes;
  stats_.in_flight_bytes += size_bytes;
  stats_.peak_in_flight_bytes = std::max(stats_.peak_in_flight_bytes, stats_.in_flight_bytes);
  return last_number_;
}

void StreamTimeline::Complete(uint64_t value) {
  std::vector<EventRef> released;
  MutexLock lock(mu_);
  CompleteUpTo(value, released);
}

void StreamTimeline::CompleteUpTo(uint64_t value, std::vector<EventRef>& released) {
  while (!pending_.empty() && pending_.front().value <= value) {
    Pending& done = pending_.front();
    ++stats_.completed_transfers;
    stats_.completed_bytes += done.size_bytes;
    stats_.in_flight_bytes -= done.size_bytes;
    completed_.store(done.value, std::memory_order_release);
    released.push_back(std::move(done.event));
    pending_.pop_front();
  }
}

EventRef StreamTimeline::EventOf(uint64_t value) const {
  MutexLock lock(mu_);
  PINION_CHECK(value <= last_number_)
      << name_ << ": nothing with the number " << value << " was submitted";
  if (pending_.empty() || value < pending_.front().value) return nullptr;
  return pending_[value - pending_.front().value].event;
}

absl::StatusOr<bool> StreamTimeline::IsCapturing() const {
  if (ownership_ == Ownership::kOwned) return false;  // Submit refuses to follow a capture
  return device_->IsCapturing(stream_);
}

}  // namespace pinion::internal
