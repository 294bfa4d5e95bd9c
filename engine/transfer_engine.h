// Moves batches of bytes between one device and the host, beside its compute.
//
//   PINION_ASSIGN_OR_RETURN(auto engine, TransferEngine::Create({}, device));
//   auto buffer = std::make_shared<HostBuffer>(std::move(block));
//   CopyBatch batch(CopyDirection::kDeviceToHost);
//   batch.Add(buffer, 0, data, size_bytes);
//   // After compute's present work:
//   PINION_ASSIGN_OR_RETURN(Transfer out, engine->Submit(batch, compute));
//   // An event, the host goes on:
//   PINION_RETURN_IF_ERROR(out.WaitOn(compute, kReuseAfterCopy));
//
// Waits have names (stream/wait_site.h); a program that uses the engine by itself declares its own:
//
//   inline constexpr std::array<std::string_view, 1> kWaits = {"kReuseAfterCopy"};
//   inline constexpr WaitSite kReuseAfterCopy("kReuseAfterCopy", kWaits);
//
// Two streams per device, one per direction, never the legacy default stream: links are full
// duplex. What is submitted to one direction executes in order of submission. Before a batch's
// copies the engine makes its stream wait for (a) the present work of the `after` stream and
// (b) copies of the other direction that still touch one of its host buffers (H2D of a block waits
// for that block's D2H; D2H into a block waits for reads of it), and work of others that has a
// ticket there. For work that ends in no event, the read of a file say, Submit blocks the host.
//
// Each submission is numbered on its direction's timeline (a Transfer's ticket). One event per
// submission, kept in a FIFO ring, polled outside locks.
//
// A large batch goes in chunks of about half a millisecond of the link, at most half of the window,
// so that the small copies of others on the same copy engine have their turn; one Transfer covers
// all of them. Copies to the host are enqueued without waiting: the blocks of pinned memory that
// they fill bound them. Copies to the device are what somebody waits for, and what is submitted
// next queues behind them, so that no more than the window is in flight: Submit blocks the host
// until there is room, two chunks at a time keep the link busy. A caller that has a bound of its
// own for what it fetches ahead says so (FlowControl::kCaller in copy_batch.h) and is never
// blocked.
//
// Errors: a call that fails for the moment (Unavailable) is repeated at once, `transient_retries`
// times. If it still fails, or device memory is short, the error is returned and nothing of that
// batch will be written later: where chunks of it are under way, Submit waits for them first. A
// sticky error poisons the engine: it makes no further device call, every later call returns the
// first error with the name of the call that failed, tickets that were not done stay undone (so
// their host blocks are never reused), and no host data is lost. A device that stands still and
// reports no error is waited for, and the log says so: only an error or the caller's own deadline
// ends a wait. A timeout names the submission that is not done and what that one waits for.
//
// Thread safety: thread-safe. Submissions of one direction take turns; no mutex is held across a
// device call.
// Ownership: transfers and tickets share ownership of what they need; the engine's destructor
// shuts it down within `drain_timeout`, then leaks what is still in flight and says so.

#ifndef PINION_ENGINE_TRANSFER_ENGINE_H_
#define PINION_ENGINE_TRANSFER_ENGINE_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "pinion/allocator/fence.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/device/device.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/stats/engine_stats.h"
#include "pinion/engine/stream/wait_site.h"

namespace pinion {

class TraceSink;

struct EngineOptions {
  // The window: Submit blocks the host rather than have more than this in flight to the device,
  // where the batch leaves flow control to the engine. What is submitted next queues behind it, so
  // a copy in that is needed waits for at most this many bytes (256 MiB: 5 ms on PCIe 5, 1 ms on
  // NVLink-C2C). Large enough that the fixed cost of a chunk, which is at most half a window, is
  // below 1 % on the fastest link. Must be positive.
  uint64_t max_in_flight_bytes = uint64_t{256} << 20;

  // How long the destructor waits for what is in flight before it leaks that.
  absl::Duration drain_timeout = absl::Seconds(60);

  // How often a device call that fails for the moment (Unavailable) is made again before its error
  // is returned. Without a pause: what does not pass at once is for the caller to see, and nobody
  // sleeps with a turn in hand. At least 0.
  int transient_retries = 2;

  // Where ranges, transfers and stalls are told to (device/trace/trace_sink.h); null: nowhere.
  std::shared_ptr<TraceSink> trace;

  // Fills EngineStats's copy and stall times through two timed events around each chunk, and around
  // each wait for one. On, too, with a sink that wants transfers. Costs the host two records and
  // three queries per chunk and per wait.
  bool time_transfers = false;

  absl::Status Validate() const;
};

namespace internal {
class StreamTimeline;
}

// One submitted batch. A copyable value; default-constructed it is done.
class Transfer {
 public:
  Transfer() = default;

  FenceTicket ticket() const;
  uint64_t number() const { return value_; }  // the ticket's
  bool IsDone() const;                        // as far as polling knows; no device call

  // Later work of `stream` starts after this transfer. Makes no device call when it is known to
  // be done. Never blocks the host. FailedPrecondition while `stream` captures a graph and the
  // transfer is not done: Wait() on the host instead.
  absl::Status WaitOn(StreamHandle stream, const WaitSite& site) const;

  // Blocks the host until the transfer is done. DeadlineExceeded after `timeout`, naming the
  // transfer and what its stream is stuck behind where the device knows.
  absl::Status Wait(absl::Duration timeout) const;

 private:
  friend class TransferEngine;
  std::shared_ptr<internal::StreamTimeline> timeline_;
  uint64_t value_ = 0;
};

class TransferEngine {
 public:
  static absl::StatusOr<std::shared_ptr<TransferEngine>> Create(const EngineOptions& options,
                                                                std::shared_ptr<Device> device);
  virtual ~TransferEngine() = default;

  // Enqueues the batch (not empty) after the present work of `after`. FailedPrecondition while
  // `after` captures a graph. Flow control waits for as long as it takes.
  virtual absl::StatusOr<Transfer> Submit(const CopyBatch& batch, StreamHandle after) = 0;

  // A ticket for the present work of a foreign stream: done when that work is. The stream must
  // live until then. FailedPrecondition while it captures a graph.
  virtual absl::StatusOr<FenceTicket> Mark(StreamHandle stream) = 0;

  // Later work of `later` starts after the present work of `earlier`. Never blocks the host.
  // FailedPrecondition while either captures a graph: one would be drawn into the other's.
  virtual absl::Status OrderStreams(StreamHandle earlier, StreamHandle later,
                                    const WaitSite& site) = 0;

  // True while `stream` captures a graph: nothing can be submitted after it, or wait in it.
  virtual absl::StatusOr<bool> IsCapturing(StreamHandle stream) = 0;

  // What the device's link can do, for whoever plans transfers: measured by the first call, which
  // borrows device memory and some of `allocator` for it (link_calibration.h), and remembered.
  virtual absl::StatusOr<LinkCalibration> Calibrate(PinnedAllocator& allocator) = 0;

  // Asks the device how far both directions have come.
  virtual void Poll() = 0;

  // Blocks until everything submitted so far is done. DeadlineExceeded after `timeout`.
  virtual absl::Status Drain(absl::Duration timeout) = 0;

  // Ends the engine: from now on Submit, Mark, OrderStreams and calibration are refused
  // (FailedPrecondition), and what was submitted is drained. DeadlineExceeded after `timeout`, as
  // Drain; what is in flight then is leaked if nobody waits for it later: transfers and tickets can
  // still be waited for.
  virtual absl::Status Shutdown(absl::Duration timeout) = 0;

  // OkStatus, or the sticky error that poisoned the engine.
  virtual absl::Status health() const = 0;

  virtual Device& device() const = 0;
  virtual EngineStats GetStats() const = 0;

 protected:
  static Transfer MakeTransfer(std::shared_ptr<internal::StreamTimeline> timeline, uint64_t value);
};

}  // namespace pinion

#endif  // PINION_ENGINE_TRANSFER_ENGINE_H_
