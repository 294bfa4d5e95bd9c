// Times transfers on the device, and the stalls of streams that wait for them.
//
//   const TransferTimer::Start start = timer->Begin(stream);   // a timed event before the copies
//   ... CopyAsync ...
//   timer->EndTransfer(start, stream, {...});                  // and one behind them
//
// Around a wait, the time between the two events is the stall. On an idle stream it includes some
// microseconds in which the stream waits for the host's next calls.
//
// Collect finds finished spans and never blocks. Times go into a histogram per direction, and to
// the sink. If an event cannot be recorded, the measurement is lost, not the transfer.
//
// Thread safety: thread-safe. No device or sink call is made under the mutex. Calls of Begin and
// EndTransfer for one copy stream follow the order of the stream (the engine: within its turn).
// Ownership: shared by the engine and its timelines; keeps the sink alive.

#ifndef PINION_ENGINE_STREAM_TRANSFER_TIMER_H_
#define PINION_ENGINE_STREAM_TRANSFER_TIMER_H_

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/device/device.h"
#include "pinion/device/trace/trace_sink.h"
#include "pinion/engine/stats/engine_stats.h"
#include "pinion/engine/stream/event_pool.h"
#include "pinion/engine/stream/guarded_device.h"
#include "pinion/engine/stream/wait_site.h"

namespace pinion::internal {

class TransferTimer {
 public:
  // A point of a stream. Without an event it cannot be timed.
  struct Start {
    EventRef event;
    double host_ms = 0;
  };
  struct Copy {
    CopyDirection direction = CopyDirection::kHostToDevice;
    uint64_t number = 0;
    uint64_t size_bytes = 0;
    uint64_t pieces = 0;
  };

  // Creates a timer. `idle_stream` must be idle: its present synchronises the device's clock with
  // the host's. `sink` may be null.
  static absl::StatusOr<std::shared_ptr<TransferTimer>> Create(
      std::shared_ptr<GuardedDevice> device, StreamHandle idle_stream,
      std::shared_ptr<TraceSink> sink);

  Start Begin(StreamHandle stream);
  void EndTransfer(Start start, StreamHandle stream, const Copy& copy);
  // Ends a stall: `stream` has just enqueued a wait for submission `number` of `direction`.
  void EndStall(Start start, StreamHandle stream, const WaitSite& site, CopyDirection direction,
                uint64_t number);

  // Collects finished spans. Returns at once while another thread collects.
  void Collect();

  // Collects if many spans are pending. For frequent submitters, in case nobody polls.
  void CollectIfMany();

  // Adds the collected times to `stats`.
  void AddTo(CopyDirection direction, DirectionStats& stats) const;

 private:
  struct Anchor {
    EventRef event;
    double ms = 0;  // its time on the clock of trace_sink.h
  };
  struct Span {
    EventRef start;
    EventRef end;
    double host_ms = 0;
    Copy copy;  // the copy, or the copy that a stall waited for
    StreamHandle stream;
    const WaitSite* stalled_at = nullptr;  // null: a copy
  };
  struct Measured {
    enum { kNotDone, kFailed, kDone } outcome = kNotDone;
    double start_ms = 0;
    double duration_ms = 0;
  };
  struct Times {
    DurationHistogram copy;
    DurationHistogram stall;
    uint64_t untimed = 0;
  };
  // Spans of a lane end in the order in which they began; those of kStalls mostly do. kH2d and kD2h
  // equal their CopyDirection.
  enum Lane { kH2d, kD2h, kStalls, kLaneCount };

  TransferTimer(std::shared_ptr<GuardedDevice> device, std::shared_ptr<EventPool> events,
                std::shared_ptr<TraceSink> sink, Anchor anchor);

  EventRef Record(StreamHandle stream);
  void End(Lane lane, Span span);
  void CollectLane(Lane lane);
  Measured Measure(const Span& span);
  void Report(const Span& span, const Measured& measured) const;
  Times& TimesOf(CopyDirection direction) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::shared_ptr<GuardedDevice> device_;
  const std::shared_ptr<EventPool> events_;
  const std::shared_ptr<TraceSink> sink_;
  const std::string device_name_;

  mutable Mutex mu_;
  bool collecting_ ABSL_GUARDED_BY(mu_) = false;
  Anchor anchor_ ABSL_GUARDED_BY(mu_);
  std::array<std::deque<Span>, kLaneCount> lanes_ ABSL_GUARDED_BY(mu_);
  std::array<Times, 2> times_ ABSL_GUARDED_BY(mu_);  // by direction
};

}  // namespace pinion::internal

#endif  // PINION_ENGINE_STREAM_TRANSFER_TIMER_H_
