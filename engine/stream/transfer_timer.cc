#include "pinion/engine/stream/transfer_timer.h"

#include <cstddef>
#include <utility>

#include "absl/time/time.h"
#include "pinion/allocator/base/status_macros.h"

namespace pinion::internal {
namespace {

// A lane with more pending spans belongs to a stuck stream: later spans are not timed.
constexpr size_t kMaxPending = 4096;

constexpr size_t kManyPending = 16;

// CUDA returns elapsed times as floats: a nearby anchor keeps their resolution at 0.5 us.
constexpr double kAnchorMs = 1000;

constexpr absl::Duration kIdleStreamTimeout = absl::Seconds(10);

}  // namespace

TransferTimer::TransferTimer(std::shared_ptr<GuardedDevice> device,
                             std::shared_ptr<EventPool> events, std::shared_ptr<TraceSink> sink,
                             Anchor anchor)
    : device_(std::move(device)),
      events_(std::move(events)),
      sink_(std::move(sink)),
      device_name_(device_->device().name()),
      anchor_(std::move(anchor)) {}

absl::StatusOr<std::shared_ptr<TransferTimer>> TransferTimer::Create(
    std::shared_ptr<GuardedDevice> device, StreamHandle idle_stream,
    std::shared_ptr<TraceSink> sink) {
  auto events = std::make_shared<EventPool>(device, EventPool::Timing::kTimed);
  Anchor anchor;
  PINION_ASSIGN_OR_RETURN(anchor.event, events->Acquire());
  PINION_RETURN_IF_ERROR(device->RecordEvent(anchor.event->handle(), idle_stream));
  anchor.ms = SteadyClockMs();
  PINION_RETURN_IF_ERROR(device->WaitEvent(anchor.event->handle(), kIdleStreamTimeout));
  return std::shared_ptr<TransferTimer>(
      new TransferTimer(std::move(device), std::move(events), std::move(sink), std::move(anchor)));
}

EventRef TransferTimer::Record(StreamHandle stream) {
  absl::StatusOr<EventRef> event = events_->Acquire();
  if (!event.ok() || !device_->RecordEvent((*event)->handle(), stream).ok()) return EventRef();
  return *std::move(event);
}

TransferTimer::Start TransferTimer::Begin(StreamHandle stream) {
  return {Record(stream), SteadyClockMs()};
}

void TransferTimer::EndTransfer(Start start, StreamHandle stream, const Copy& copy) {
  Span span;
  span.start = std::move(start.event);
  span.host_ms = start.host_ms;
  span.copy = copy;
  span.stream = stream;
  End(static_cast<Lane>(copy.direction), std::move(span));
}

void TransferTimer::EndStall(Start start, StreamHandle stream, const WaitSite& site,
                             CopyDirection direction, uint64_t number) {
  Span span;
  span.start = std::move(start.event);
  span.copy.direction = direction;
  span.copy.number = number;
  span.stream = stream;
  span.stalled_at = &site;
  End(kStalls, std::move(span));
}

void TransferTimer::End(Lane lane, Span span) {
  if (span.start != nullptr) span.end = Record(span.stream);
  MutexLock lock(mu_);
  if (span.end == nullptr || lanes_[lane].size() >= kMaxPending) {
    ++TimesOf(span.copy.direction).untimed;
  } else {
    lanes_[lane].push_back(std::move(span));
  }
}

void TransferTimer::Collect() {
  // Before any lock: a child of fork() may find it taken for ever.
  if (!device_->health().ok()) return;
  {
    MutexLock lock(mu_);
    if (collecting_) return;
    collecting_ = true;
  }
  for (const Lane lane : {kH2d, kD2h, kStalls}) CollectLane(lane);
  MutexLock lock(mu_);
  collecting_ = false;
}

void TransferTimer::CollectIfMany() {
  size_t pending = 0;
  {
    MutexLock lock(mu_);
    for (const std::deque<Span>& lane : lanes_) pending += lane.size();
  }
  if (pending > kManyPending) Collect();
}

void TransferTimer::CollectLane(Lane lane) {
  while (true) {
    Span span;  // releases its events after the lock
    {
      MutexLock lock(mu_);
      if (lanes_[lane].empty()) return;
      span = lanes_[lane].front();
    }
    const Measured measured = Measure(span);
    if (measured.outcome == Measured::kNotDone) return;
    {
      MutexLock lock(mu_);
      lanes_[lane].pop_front();
      Times& times = TimesOf(span.copy.direction);
      if (measured.outcome == Measured::kFailed) {
        ++times.untimed;
      } else {
        (span.stalled_at != nullptr ? times.stall : times.copy).Add(measured.duration_ms);
      }
    }
    if (measured.outcome == Measured::kDone) Report(span, measured);
  }
}

TransferTimer::Measured TransferTimer::Measure(const Span& span) {
  const absl::StatusOr<bool> done = device_->QueryEvent(span.end->handle());
  if (!done.ok()) return {.outcome = Measured::kFailed};
  if (!*done) return {.outcome = Measured::kNotDone};
  Anchor anchor;
  {
    MutexLock lock(mu_);
    anchor = anchor_;
  }
  const absl::StatusOr<double> start_ms =
      device_->ElapsedMs(anchor.event->handle(), span.start->handle());
  const absl::StatusOr<double> duration_ms =
      device_->ElapsedMs(span.start->handle(), span.end->handle());
  if (!start_ms.ok() || !duration_ms.ok()) return {.outcome = Measured::kFailed};
  const double anchored_ms = anchor.ms + *start_ms;
  if (*start_ms > kAnchorMs) {
    anchor = {span.start, anchored_ms};
    MutexLock lock(mu_);
    std::swap(anchor_, anchor);  // the old event is released after the lock
  }
  return {.outcome = Measured::kDone, .start_ms = anchored_ms, .duration_ms = *duration_ms};
}

void TransferTimer::Report(const Span& span, const Measured& measured) const {
  if (sink_ == nullptr) return;
  const double end_ms = measured.start_ms + measured.duration_ms;
  if (span.stalled_at != nullptr) {
    sink_->OnStall({.device = device_name_,
                    .stream = span.stream,
                    .wait_site = span.stalled_at->name(),
                    .direction = span.copy.direction,
                    .transfer_number = span.copy.number,
                    .start_ms = measured.start_ms,
                    .end_ms = end_ms});
  } else {
    sink_->OnTransfer({.device = device_name_,
                       .direction = span.copy.direction,
                       .number = span.copy.number,
                       .size_bytes = span.copy.size_bytes,
                       .pieces = span.copy.pieces,
                       .submitted_ms = span.host_ms,
                       .start_ms = measured.start_ms,
                       .end_ms = end_ms});
  }
}

TransferTimer::Times& TransferTimer::TimesOf(CopyDirection direction) {
  return times_[static_cast<size_t>(direction)];
}

void TransferTimer::AddTo(CopyDirection direction, DirectionStats& stats) const {
  MutexLock lock(mu_);
  const Times& times = times_[static_cast<size_t>(direction)];
  stats.copy_time = times.copy.Summary();
  stats.stall_time = times.stall.Summary();
  stats.untimed = times.untimed;
}

}  // namespace pinion::internal
