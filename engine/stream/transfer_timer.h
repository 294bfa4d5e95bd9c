// How long transfers took on the device, and for how long streams waited for them.
//
//   const TransferTimer::Start start = timer->Begin(stream);   // a timed event before the copies
//   ... CopyAsync ...
//   timer->EndTransfer(start, stream, {...});                   // and one behind them
//
// The same around a wait: the time between the two events is what the stream was stalled for.
// A stream that was idle gets to the first event at once and then waits for the host's next calls,
// which so count, too: some microseconds.
//
// What is done is found out when somebody polls (Collect), never by blocking; then it goes into a
// histogram per direction and to the sink. An event that cannot be recorded costs the measurement,
// not the transfer.
//
// Thread safety: thread-safe. No device call is made, and no sink called, with the mutex held. Who
// calls Begin and EndTransfer for one stream of copies does so in the order of the stream (the
// engine: in its turn).
// Ownership: shared by the engine and its timelines; keeps the sink alive.

#ifndef PINION_ENGINE_STREAM_TRANSFER_TIMER_H_
#define PINION_ENGINE_STREAM_TRANSFER_TIMER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/device/device.h"
#include "pinion/device/trace/trace_sink.h"
#include "pinion/engine/stats/duration_histogram.h"
#include "pinion/engine/stats/engine_stats.h"
#include "pinion/engine/stream/event_pool.h"
#include "pinion/engine/stream/guarded_device.h"
#include "pinion/engine/stream/wait_site.h"

namespace pinion::internal {

class TransferTimer {
 public:
  // A moment of a stream. Empty, and then of no use, where its event could not be recorded.
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

  // `idle_stream` has nothing to do: its present sets the device's clock. `sink` may be null.
  static absl::StatusOr<std::shared_ptr<TransferTimer>> Create(
      std::shared_ptr<GuardedDevice> device, StreamHandle idle_stream,
      std::shared_ptr<TraceSink> sink);

  Start Begin(StreamHandle stream);
  void EndTransfer(Start start, StreamHandle stream, const Copy& copy);
  // `stream` has just been made to wait for number `number` of `direction`.
  void EndStall(Start start, StreamHandle stream, const WaitSite& site, CopyDirection direction,
                uint64_t number);

  // Takes in what is done. Returns at once while another thread does so.
  void Collect();

  // For whoever submits often, in case that nobody polls.
  void CollectIfMany();

  // Adds what was collected so far to `stats`.
  void AddTo(CopyDirection direction, DirectionStats& stats) const;

 private:
  struct Anchor {
    EventRef event;
    double ms = 0;  // when it was, on the clock of trace_sink.h
  };
  struct Span {
    EventRef start;
    EventRef end;
    double host_ms = 0;
    Copy copy;  // or what a stall was for
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
  // Spans that end in the order in which they were begun; those of kStalls mostly do. The first two
  // have the numbers of their directions.
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
