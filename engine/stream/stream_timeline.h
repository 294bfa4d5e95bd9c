// One stream's submissions, numbered: the engine's FenceTimeline.
//
//   pending   | 5: event | 6: event | 7: event |      Completed() == 4
//
// Each number has one event, recorded right behind what it stands for. The events form a FIFO ring,
// and are queried outside of any lock: two threads that poll at once may query the same event,
// which its reference keeps from being used again, and the later answer changes nothing.
// Completed() is an atomic that only rises.
//
// Numbers equal the order of the stream because whoever enqueues work and records an event does so
// within turn(). A foreign handle may be two streams, one after the other: a program destroys one,
// and the next one that it creates has the same handle. What is done on the second says nothing of
// the first, so each number of a foreign timeline is asked for by itself.
//
// From its event on, a submission needs no stream: a foreign one may be destroyed (asking a dead
// stream anything is undefined in CUDA) or capture a graph, while its events are polled. They were
// recorded outside of the graph, and devices ask for them in a way that leaves captures alone.
//
// Once the device is poisoned the timeline never advances again.
//
// Thread safety: thread-safe.
// Ownership: shared by the engine, its transfers and their tickets. A timeline that made its stream
// destroys it, unless work is left on it: then the stream is leaked, and the log says so.

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
#include "pinion/engine/stream/fifo_turn.h"
#include "pinion/engine/stream/guarded_device.h"
#include "pinion/engine/stream/transfer_timer.h"
#include "pinion/engine/stream/wait_site.h"

namespace pinion::internal {

class StreamTimeline;

// The host waits for a copy whose event could not be recorded.
inline constexpr WaitSite kCopyWithoutEvent("kCopyWithoutEvent", kEngineWaits);

// What a submission was ordered after, beside its predecessor: kept until it is done, so that a
// timeout can name what is in the way. Devices do not tell.
struct Prerequisites {
  EventRef compute;  // null: none
  // Numbers of other timelines. Weak: two directions wait for each other's submissions.
  std::vector<std::pair<std::weak_ptr<FenceTimeline>, uint64_t>> submissions;
};

// Copies, one behind the other, that are to have one number.
struct SubmittedCopy {
  uint64_t size_bytes = 0;
  uint64_t pieces = 0;
  uint64_t chunks = 0;        // of its batch
  bool ends_transfer = true;  // the last chunk of its batch
  Prerequisites after;
};

class StreamTimeline final : public FenceTimeline {
 public:
  enum class Ownership { kOwned, kForeign };

  // `name` is for messages: "D2H on emu:0".
  StreamTimeline(std::shared_ptr<GuardedDevice> device, StreamHandle stream, Ownership ownership,
                 std::string name);
  ~StreamTimeline() override;

  // Times waits for this timeline, the copies of `direction`. Before anybody else has it.
  void SetTimer(std::shared_ptr<TransferTimer> timer, CopyDirection direction);

  StreamHandle stream() const { return stream_; }
  FifoTurn& turn() { return turn_; }

  // --- Within turn() ---

  // Records `event` and gives what is on the stream now the next number. An error changes nothing.
  absl::StatusOr<uint64_t> Mark(EventRef event);

  // The same for copies that are already enqueued, so that they must not be lost: where `event`
  // cannot be recorded, this waits for the stream instead, and where that fails too it poisons the
  // device, if it is not poisoned yet. The number is never done then.
  uint64_t NumberCopy(EventRef event, SubmittedCopy&& copy);

  void CountFailedSubmit();
  void CountFlowControlWait();

  // --- Anywhere ---

  // The smallest number whose completion leaves at most `allowed_bytes` in flight; 0 if that is so
  // already.
  uint64_t NumberToWaitFor(uint64_t allowed_bytes) const;
  uint64_t last_number() const { return last_number_.load(std::memory_order_acquire); }
  size_t pending_count() const;
  DirectionStats GetStats() const;

  // `stream` (of another device, maybe) does not capture. It is not asked to wait when `value` is
  // known to be done.
  absl::Status OrderAfter(uint64_t value, EventWaiter& stream) override;
  // The same for any stream of this device, timed. FailedPrecondition while it captures, unless
  // `value` is done: a wait for work outside of the graph breaks the capture.
  absl::Status OrderAfter(uint64_t value, StreamHandle stream, const WaitSite& site);

  uint64_t Completed() const noexcept override {
    return completed_.load(std::memory_order_acquire);
  }
  void Poll() override;
  // For whoever submits, so that events are used again even if nobody else asks how far the stream
  // has come: polls once many submissions are pending.
  void PollIfMany();
  // A DeadlineExceeded says what keeps `value`.
  absl::Status Wait(uint64_t value, absl::Duration timeout) override;
  // "D2H on emu:0, where submission 12 (8 MiB in 3 pieces) has not started: it waits for ..." Asks
  // the device.
  std::string WhyPending(uint64_t value) override;
  // Waits for as long as the device is healthy: one that stands still (a rank that straggles, a
  // debugger) goes on some time. The log says now and then what is waited for. DeadlineExceeded
  // only from a device that knows that it will stand still for ever, as an emulated one does.
  absl::Status WaitWhileHealthy(uint64_t value);

 private:
  struct Pending {
    uint64_t value = 0;
    EventRef event;
    SubmittedCopy copy;
  };

  // What is done. It is let go of behind the lock, all events at once.
  struct Released {
    ~Released();
    std::deque<Pending> all;
  };
  using Events = absl::InlinedVector<EventRef, 1>;

  uint64_t Append(EventRef event, SubmittedCopy&& copy) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Complete(uint64_t value);
  // Moves what is done into `released`, whose owner lets go of it after the lock.
  void CompleteUpTo(uint64_t value, Released& released) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // What WhyPending says, without the timeline's name.
  std::string WhyNumberIsPending(uint64_t value);
  static std::string Describe(const Pending& pending);
  // What the oldest submission waits for.
  std::string WhatHolds(const Pending& oldest) const;
  // The next three: nothing when `value` is done.
  const Pending* Find(uint64_t value) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Those whose completion means that `value` and all before it are done: of a foreign stream,
  // which may be two, each.
  Events EventsOf(uint64_t value) const;
  // What is waited for next by who waits for `value`: that, but of a foreign stream the oldest.
  std::pair<uint64_t, EventRef> NextOf(uint64_t value) const;

  const std::shared_ptr<GuardedDevice> device_;
  const StreamHandle stream_;
  const Ownership ownership_;
  const std::string name_;
  std::shared_ptr<TransferTimer> timer_;  // null: waits are not timed
  CopyDirection direction_{};             // set with timer_
  // Apart from what is only read, since whoever submits writes to it.
  alignas(64) FifoTurn turn_;

  // Written under mu_; apart from the turn, at which others look meanwhile.
  alignas(64) std::atomic<uint64_t> last_number_{0};
  std::atomic<uint64_t> completed_{0};
  mutable Mutex mu_;
  // From completed_ + 1 on.
  std::deque<Pending> pending_ ABSL_GUARDED_BY(mu_);
  DirectionStats stats_ ABSL_GUARDED_BY(mu_);
};

}  // namespace pinion::internal

#endif  // PINION_ENGINE_STREAM_STREAM_TIMELINE_H_
