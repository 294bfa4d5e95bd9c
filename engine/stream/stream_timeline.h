// Numbers one stream's submissions and tells when they are done: the engine's FenceTimeline.
//
//   const FifoTurn::Scope turn(timeline->turn());
//   PINION_ASSIGN_OR_RETURN(const uint64_t value, timeline->Mark(std::move(event)));
//   PINION_RETURN_IF_ERROR(timeline->Wait(value, absl::Seconds(10)));
//
//   pending   | 5: event | 6: event | 7: event |      Completed() == 4
//
// Each number has one event, recorded right behind its work. Events are queried outside of any
// lock. Two threads may query one event at once; its reference prevents reuse, and the later answer
// changes nothing. Completed() only rises.
//
// Numbers follow the order of the stream, because submitters enqueue and record within turn(). A
// foreign handle may be two streams in succession: a program destroys a stream and gets the same
// handle again. So each number of a foreign timeline is queried by itself.
//
// After its event is recorded, a submission does not need its stream. A foreign stream may be
// destroyed, or may capture a graph while its earlier events are polled.
//
// After the device is poisoned the timeline never advances.
//
// Thread safety: thread-safe.
// Ownership: shared by the engine, its transfers and their tickets. An owned stream is destroyed
// with its timeline, or leaked with a log message if work is pending.

#ifndef PINION_ENGINE_STREAM_STREAM_TIMELINE_H_
#define PINION_ENGINE_STREAM_STREAM_TIMELINE_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/fence.h"
#include "pinion/device/device.h"
#include "pinion/engine/stats/engine_stats.h"
#include "pinion/engine/stream/event_pool.h"
#include "pinion/engine/stream/guarded_device.h"
#include "pinion/engine/stream/transfer_timer.h"
#include "pinion/engine/stream/wait_site.h"

namespace pinion::internal {

// A ticket lock: threads enter in order of arrival. Unlike a mutex, it is held across device calls.
//
//   FifoTurn::Scope turn(timeline->turn());
//
// So code that a device call may run into must never take it. While holding it, wait for nothing
// else but the device.
class FifoTurn {
 public:
  class [[nodiscard]] Scope {
   public:
    [[nodiscard]] explicit Scope(FifoTurn& turn) : turn_(turn) { turn_.Enter(); }
    ~Scope() { turn_.Leave(); }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    FifoTurn& turn_;
  };

 private:
  void Enter() {
    const int mine = next_.fetch_add(1, std::memory_order_relaxed);
    // The next thread spins first: most turns are a few device calls, each of which only enqueues.
    const bool is_next = mine - serving_.load(std::memory_order_acquire) <= 1;
    for (Spin spin; is_next && serving_.load(std::memory_order_acquire) != mine && spin.Again();) {
    }
    for (int serving; (serving = serving_.load(std::memory_order_acquire)) != mine;) {
      serving_.wait(serving, std::memory_order_acquire);
    }
  }
  void Leave() {
    serving_.fetch_add(1);
    serving_.notify_all();
  }

  // Ticket numbers; they may wrap around.
  std::atomic<int> next_ = 0;
  std::atomic<int> serving_ = 0;
};

class StreamTimeline;

// The host waits for a copy whose event could not be recorded.
inline constexpr WaitSite kCopyWithoutEvent("kCopyWithoutEvent", kEngineWaits);

// The work that a submission waits for, apart from its predecessor. Kept until the submission is
// done, so that timeouts can name the obstacle; devices do not report it.
struct Prerequisites {
  EventRef compute;  // null: none
  // Numbers of other timelines. Weak, because both directions wait for each other's submissions.
  std::vector<std::pair<std::weak_ptr<FenceTimeline>, uint64_t>> submissions;
};

// Consecutive copies that share one number.
struct SubmittedCopy {
  uint64_t size_bytes = 0;
  uint64_t pieces = 0;
  uint64_t chunks = 0;        // of its batch
  bool ends_transfer = true;  // contains the last chunk of its batch
  Prerequisites after;
};

class StreamTimeline final : public FenceTimeline {
 public:
  enum class Ownership { kOwned, kForeign };

  // `name` is for messages: "D2H on emu:0".
  StreamTimeline(std::shared_ptr<GuardedDevice> device, StreamHandle stream, Ownership ownership,
                 std::string name);
  ~StreamTimeline() override;

  // Times waits for this timeline's copies (of `direction`). Call it before sharing the timeline.
  void SetTimer(std::shared_ptr<TransferTimer> timer, CopyDirection direction);

  StreamHandle stream() const { return stream_; }
  FifoTurn& turn() { return turn_; }

  // --- Within turn() ---

  // Records `event` and numbers the work that is on the stream. An error changes nothing.
  absl::StatusOr<uint64_t> Mark(EventRef event);

  // Numbers copies that are already enqueued. If `event` cannot be recorded, waits for the stream
  // instead. If that fails too, poisons the device; the number then never completes.
  uint64_t NumberCopy(EventRef event, SubmittedCopy&& copy);

  void CountFailedSubmit();

  // --- Anywhere ---

  uint64_t last_number() const { return last_number_.load(std::memory_order_acquire); }
  size_t pending_count() const;
  DirectionStats GetStats() const;

  // Makes `stream` wait for `value`. `stream` must not capture, and may belong to another device.
  // Does nothing if `value` is known to be done.
  absl::Status OrderAfter(uint64_t value, EventWaiter& stream) override;
  // Like above for any stream of this device, and timed. FailedPrecondition if `stream` captures
  // and `value` is pending: a captured wait for outside work breaks the capture.
  absl::Status OrderAfter(uint64_t value, StreamHandle stream, const WaitSite& site);

  uint64_t Completed() const noexcept override {
    return completed_.load(std::memory_order_acquire);
  }
  void Poll() override;
  // Polls if many submissions are pending. Submitters call it to recycle events.
  void PollIfMany();
  // Blocks until `value` is done. DeadlineExceeded names the obstacle.
  absl::Status Wait(uint64_t value, absl::Duration timeout) override;
  // Returns "D2H on emu:0, where submission 12 (8 MiB in 3 pieces) has not started: it waits for
  // ...". Calls the device.
  std::string WhyPending(uint64_t value) override;
  // Waits as long as the device is healthy, and logs the obstacle at intervals: a device that
  // stands still (a straggling rank, a debugger) continues later. DeadlineExceeded only from
  // devices that know they are stuck, as the emulated one.
  absl::Status WaitWhileHealthy(uint64_t value);

 private:
  struct Pending {
    uint64_t value = 0;
    EventRef event;
    SubmittedCopy copy;
  };

  using Events = absl::InlinedVector<EventRef, 1>;

  uint64_t Append(EventRef event, SubmittedCopy&& copy) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Complete(uint64_t value);
  // Like WhyPending, without the timeline's name.
  std::string WhyNumberIsPending(uint64_t value);
  static std::string Describe(const Pending& pending);
  // Describes the obstacle of the oldest submission.
  std::string WhatHolds(const Pending& oldest) const;
  // Returns InvalidArgument for a number that no submission has.
  absl::Status CheckGiven(uint64_t value) const;
  // Returns null if `value` is done. EventsOf and NextOf return nothing then. `value` must be a
  // submission's.
  const Pending* Find(uint64_t value) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Returns the events that complete `value` and its predecessors: the event of `value`. On a
  // foreign handle, which may be two streams, these are all pending events up to it.
  Events EventsOf(uint64_t value) const;
  // Returns the next event to wait for: that of `value`, or on a foreign handle the oldest one.
  std::pair<uint64_t, EventRef> NextOf(uint64_t value) const;

  const std::shared_ptr<GuardedDevice> device_;
  const StreamHandle stream_;
  const Ownership ownership_;
  const std::string name_;
  std::shared_ptr<TransferTimer> timer_;  // null: waits are not timed
  CopyDirection direction_{};             // set with timer_
  // On a cache line of its own: submitters write to it.
  alignas(64) FifoTurn turn_;

  // Written under mu_. Apart from the turn, which other threads poll meanwhile.
  alignas(64) std::atomic<uint64_t> last_number_{0};
  std::atomic<uint64_t> completed_{0};
  mutable Mutex mu_;
  // Numbers from completed_ + 1 on.
  std::deque<Pending> pending_ ABSL_GUARDED_BY(mu_);
  DirectionStats stats_ ABSL_GUARDED_BY(mu_);
};

}  // namespace pinion::internal

#endif  // PINION_ENGINE_STREAM_STREAM_TIMELINE_H_
