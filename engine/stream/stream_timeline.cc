#include "pinion/engine/stream/stream_timeline.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/deadline.h"
#include "pinion/allocator/base/status_macros.h"

namespace pinion::internal {
namespace {

constexpr size_t kManySubmissions = 16;

}  // namespace

StreamTimeline::StreamTimeline(std::shared_ptr<GuardedDevice> device, StreamHandle stream,
                               Ownership ownership, std::string name)
    : device_(std::move(device)), stream_(stream), ownership_(ownership), name_(std::move(name)) {}

StreamTimeline::~StreamTimeline() {
  if (ownership_ == Ownership::kForeign || !device_->health().ok()) return;
  Poll();
  if (const size_t pending = pending_count(); pending > 0) {
    PINION_LOG(kError) << name_ << ": leaked the stream, " << pending
                       << " submissions on it are not done: " << WhyNumberIsPending(last_number());
    return;
  }
  if (absl::Status destroyed = device_->DestroyStream(stream_); !destroyed.ok()) {
    PINION_LOG(kError) << name_ << ": leaked the stream: " << destroyed.message();
  }
}

void StreamTimeline::SetTimer(std::shared_ptr<TransferTimer> timer, CopyDirection direction) {
  timer_ = std::move(timer);
  direction_ = direction;
}

absl::StatusOr<uint64_t> StreamTimeline::Mark(EventRef event) {
  PINION_RETURN_IF_ERROR(device_->RecordEvent(event->handle(), stream_));
  SubmittedCopy nothing;
  nothing.chunks = 1;
  MutexLock lock(mu_);
  return Append(std::move(event), std::move(nothing));
}

uint64_t StreamTimeline::NumberCopy(EventRef event, SubmittedCopy&& copy) {
  const absl::Status recorded = device_->RecordEvent(event->handle(), stream_);
  bool done = false;
  if (!recorded.ok()) {
    done = !kCopyWithoutEvent.enabled() || device_->SynchronizeStream(stream_).ok();
    if (!done && device_->health().ok()) device_->Poison("RecordEvent", recorded.message());
  }
  uint64_t value = 0;
  {
    MutexLock lock(mu_);
    value = Append(std::move(event), std::move(copy));
  }
  if (done) Complete(value);
  return value;
}

void StreamTimeline::CountFailedSubmit() {
  MutexLock lock(mu_);
  ++stats_.failed_submits;
}

size_t StreamTimeline::pending_count() const {
  const uint64_t completed = Completed();  // first: both only rise
  return last_number() - completed;
}

DirectionStats StreamTimeline::GetStats() const {
  MutexLock lock(mu_);
  return stats_;
}

absl::Status StreamTimeline::OrderAfter(uint64_t value, EventWaiter& stream) {
  PINION_RETURN_IF_ERROR(CheckGiven(value));
  const Events events = EventsOf(value);
  if (events.empty()) return absl::OkStatus();
  // After a device failure the event may never complete, and the stream would be stuck.
  PINION_RETURN_IF_ERROR(device_->health());
  for (const EventRef& event : events) {
    PINION_RETURN_IF_ERROR(stream.WaitForEvent(event->handle().native()));
  }
  return absl::OkStatus();
}

absl::Status StreamTimeline::OrderAfter(uint64_t value, StreamHandle stream, const WaitSite& site) {
  if (Completed() >= value) {  // before any lock: a child of fork() may find it taken for ever
    device_->CountSkippedWait();
    return absl::OkStatus();
  }
  PINION_ASSIGN_OR_RETURN(const bool capturing, device_->IsCapturing(stream));
  if (!capturing) {
    if (timer_ == nullptr) return device_->StreamWaitTicket(stream, *this, value);
    TransferTimer::Start start = timer_->Begin(stream);
    PINION_RETURN_IF_ERROR(device_->StreamWaitTicket(stream, *this, value));
    timer_->EndStall(std::move(start), stream, site, direction_, value);
    return absl::OkStatus();
  }
  Poll();
  if (Completed() >= value) return device_->StreamWaitTicket(stream, *this, value);
  return absl::FailedPreconditionError(
      absl::StrCat(name_, ": submission ", value, " is not done, and the stream that is to wait ",
                   "for it captures a graph; wait on the host, or after the capture has ended"));
}

// Submissions of one stream finish in order, so a binary search from the end finds the last
// finished one. A foreign handle may be two streams: its events are queried one by one.
void StreamTimeline::Poll() {
  // Before any lock: a child of fork() may find it taken for ever.
  if (!device_->health().ok()) return;
  uint64_t not_done = last_number() + 1;  // as far as known
  uint64_t value = ownership_ == Ownership::kOwned ? not_done - 1 : Completed() + 1;
  while (value < not_done) {
    if (const EventRef event = NextOf(value).second) {
      const absl::StatusOr<bool> done = device_->QueryEvent(event->handle());
      if (!done.ok()) return;
      *done ? Complete(value) : void(not_done = value);
    }
    const uint64_t oldest = Completed() + 1;
    const uint64_t others = not_done - std::min(not_done, oldest);
    value = oldest + (ownership_ == Ownership::kOwned ? others / 2 : 0);
  }
}

void StreamTimeline::PollIfMany() {
  const size_t pending = pending_count();
  if (pending > kManySubmissions && pending % kManySubmissions == 1) Poll();
}

absl::Status StreamTimeline::Wait(uint64_t value, absl::Duration timeout) {
  const Deadline deadline(timeout);
  while (true) {
    // Before any lock: a child of fork() may find it taken for ever.
    const absl::Status healthy = device_->health();
    if (!healthy.ok()) return Completed() >= value ? absl::OkStatus() : healthy;
    PINION_RETURN_IF_ERROR(CheckGiven(value));
    const auto [next, event] = NextOf(value);
    if (event == nullptr) return absl::OkStatus();
    const absl::Status waited = device_->WaitEvent(event->handle(), deadline.Left());
    if (absl::IsDeadlineExceeded(waited)) {
      return absl::DeadlineExceededError(
          absl::StrCat(name_, ": after ", absl::FormatDuration(timeout), " ",
                       WhyNumberIsPending(value), " (", waited.message(), ")"));
    }
    PINION_RETURN_IF_ERROR(waited);
    Complete(next);
  }
}

absl::Status StreamTimeline::WaitWhileHealthy(uint64_t value) {
  for (const absl::Duration patience : {absl::Minutes(1), absl::Minutes(10), absl::Hours(1)}) {
    const absl::Status waited = Wait(value, patience);
    if (!absl::IsDeadlineExceeded(waited)) return waited;
    PINION_LOG(kWarning) << waited.message() << "; the device reports no error: waiting on";
  }
  return Wait(value, absl::InfiniteDuration());
}

uint64_t StreamTimeline::Append(EventRef event, SubmittedCopy&& copy) {
  if (copy.ends_transfer) ++stats_.submitted_transfers;
  stats_.submitted_chunks += copy.chunks;
  stats_.submitted_pieces += copy.pieces;
  stats_.submitted_bytes += copy.size_bytes;
  stats_.in_flight_bytes += copy.size_bytes;
  const uint64_t value = last_number() + 1;
  pending_.push_back({value, std::move(event), std::move(copy)});
  last_number_.store(value, std::memory_order_release);
  return value;
}

void StreamTimeline::Complete(uint64_t value) {
  std::deque<Pending> done;
  {
    MutexLock lock(mu_);
    auto end = pending_.begin();
    for (; end != pending_.end() && end->value <= value; ++end) {
      if (end->copy.ends_transfer) ++stats_.completed_transfers;
      stats_.completed_bytes += end->copy.size_bytes;
      stats_.in_flight_bytes -= end->copy.size_bytes;
      completed_.store(end->value, std::memory_order_release);
    }
    if (end == pending_.end()) {
      done.swap(pending_);
    } else {
      done.assign(std::move_iterator(pending_.begin()), std::move_iterator(end));
      pending_.erase(pending_.begin(), end);
    }
  }
  absl::InlinedVector<EventRef, 2 * kManySubmissions> events;  // released together
  for (Pending& pending : done) {
    events.push_back(std::move(pending.event));
    events.push_back(std::move(pending.copy.after.compute));
  }
  EventRef::LetGoOf(absl::MakeSpan(events));
}

absl::Status StreamTimeline::CheckGiven(uint64_t value) const {
  if (value <= last_number()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name_, ": nothing with the number ", value,
                   " was submitted; use tickets that the engine returned"));
}

const StreamTimeline::Pending* StreamTimeline::Find(uint64_t value) const {
  const absl::Status given = CheckGiven(value);
  PINION_CHECK(given.ok()) << given.message();
  return value <= Completed() ? nullptr : &pending_[value - Completed() - 1];
}

StreamTimeline::Events StreamTimeline::EventsOf(uint64_t value) const {
  MutexLock lock(mu_);
  const Pending* const pending = Find(value);
  if (pending == nullptr) return {};
  if (ownership_ == Ownership::kOwned) return {pending->event};
  Events events;
  for (const Pending& earlier : pending_) {
    if (earlier.value <= value) events.push_back(earlier.event);
  }
  return events;
}

std::pair<uint64_t, EventRef> StreamTimeline::NextOf(uint64_t value) const {
  MutexLock lock(mu_);
  const Pending* const pending = Find(value);
  if (pending == nullptr) return {};
  const Pending& next = ownership_ == Ownership::kOwned ? *pending : pending_.front();
  return {next.value, next.event};
}

// --- Timeout messages ---

std::string StreamTimeline::WhyPending(uint64_t value) {
  return absl::StrCat(name_, ", where ", WhyNumberIsPending(value));
}

std::string StreamTimeline::WhyNumberIsPending(uint64_t value) {
  Poll();
  Pending asked;
  Pending oldest;
  {
    MutexLock lock(mu_);
    const Pending* const pending = Find(value);
    if (pending == nullptr) return absl::StrCat("submission ", value, " is done by now");
    asked = *pending;
    oldest = pending_.front();
  }
  const std::string holds = WhatHolds(oldest);
  if (asked.value == oldest.value) return absl::StrCat(Describe(asked), " is not done: it ", holds);
  return absl::StrCat(Describe(asked), " is not done: it waits for its predecessors, and ",
                      Describe(oldest), " ", holds);
}

std::string StreamTimeline::Describe(const Pending& pending) {
  const SubmittedCopy& copy = pending.copy;
  if (copy.pieces == 0) return absl::StrCat("mark ", pending.value);
  return absl::StrCat("submission ", pending.value, " (", HumanBytes(copy.size_bytes), ", ",
                      copy.pieces, copy.pieces == 1 ? " piece)" : " pieces)");
}

std::string StreamTimeline::WhatHolds(const Pending& oldest) const {
  if (!device_->health().ok()) return "was lost when the device failed";
  if (oldest.copy.pieces == 0) return "waits for the work before it on its stream";
  const Prerequisites& after = oldest.copy.after;
  if (after.compute != nullptr) {
    const absl::StatusOr<bool> done = device_->QueryEvent(after.compute->handle());
    if (done.ok() && !*done) {
      return "has not started: it waits for the work that was on its compute stream when it was "
             "submitted";
    }
  }
  for (const auto& [timeline, value] : after.submissions) {
    // A destroyed timeline has no submissions.
    const std::shared_ptr<FenceTimeline> other = timeline.lock();
    if (other == nullptr) continue;
    const std::string why = other->WhyPending(value);
    if (other->Completed() >= value) continue;
    return absl::StrCat("has not started: it waits for ", why);
  }
  return "has all that it waits for, but its copy has not finished";
}

}  // namespace pinion::internal
