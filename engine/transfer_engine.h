// Copies batches of bytes between a device and pinned host memory, asynchronously to its compute.
//
//   PINION_ASSIGN_OR_RETURN(auto engine, TransferEngine::Create({}, device));
//   auto buffer = std::make_shared<HostBuffer>(std::move(block));
//   CopyBatch batch(CopyDirection::kDeviceToHost);
//   batch.Add(buffer, 0, data, size_bytes);
//   // After compute's present work:
//   PINION_ASSIGN_OR_RETURN(Transfer out, engine->Submit(batch, compute));
//   // An event wait; the host continues:
//   PINION_RETURN_IF_ERROR(out.WaitOn(compute, kReuseAfterCopy));
//
// Waits have names (stream/wait_site.h). A program that uses the engine directly declares its own:
//
//   inline constexpr std::array<std::string_view, 1> kWaits = {"kReuseAfterCopy"};
//   inline constexpr WaitSite kReuseAfterCopy("kReuseAfterCopy", kWaits);
//
// Order: the engine has one copy stream per direction, never the legacy default stream. Each
// direction executes in order of submission. A batch starts after the present work of the `after`
// stream. It also starts after all earlier work with a ticket on its host buffers: copies of the
// other direction, and work of other users. If such work has no event, for example reading a file,
// Submit blocks the host. A Transfer's ticket is its number on the direction's timeline.
//
// Chunks: a large batch is copied in chunks of about half a millisecond, so that other copies on
// the copy engine get their turn. One Transfer covers all chunks.
//
// Bounds: the engine has none on bytes in flight, so bound what you submit. A fetch that a stream
// needs starts after all copies to the device that were submitted before it.
//
// Errors: a call that returns Unavailable is repeated at once, `transient_retries` times. If it
// still fails, or device memory is short, the error is returned, and nothing of that batch is
// written later: Submit waits for its earlier chunks. A sticky error poisons the engine. Then it
// makes no device call, and every call returns the first error with the name of the failed call.
// Pending tickets stay pending, so their host blocks are never reused; no host data is lost. The
// engine waits for a device that stands still without an error, and logs that; only an error or the
// caller's deadline ends a wait. A timeout names the pending submission and its obstacle.
//
// Thread safety: thread-safe. Submissions of one direction take turns; no mutex is held across a
// device call.
// Ownership: transfers and tickets share ownership of their resources. The destructor shuts the
// engine down within `drain_timeout`, then leaks the copies in flight and logs that.

#ifndef PINION_ENGINE_TRANSFER_ENGINE_H_
#define PINION_ENGINE_TRANSFER_ENGINE_H_

#include <cstdint>
#include <memory>
#include <utility>

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
  // Upper bound of a chunk, in bytes. Most links have smaller chunks, of about half a millisecond.
  // Must be positive.
  uint64_t max_chunk_bytes = uint64_t{128} << 20;

  // How long the destructor waits for copies in flight before it leaks them. Must be positive.
  absl::Duration drain_timeout = absl::Seconds(60);

  // How often a device call is repeated after Unavailable, without a pause, before its error is
  // returned. At least 0.
  int transient_retries = 2;

  // Receives ranges, transfers and stalls (device/trace/trace_sink.h); null: no tracing.
  std::shared_ptr<TraceSink> trace;

  // Fills the copy and stall times of EngineStats. Also on if `trace` wants transfers. Two timed
  // events around each chunk and each wait cost the host two records and three queries.
  bool time_transfers = false;

  absl::Status Validate() const;
};

namespace internal {
class StreamTimeline;
}

// A submitted batch. A copyable value; a default-constructed one is done.
class Transfer {
 public:
  Transfer() = default;
  // For the engine. Transfer `value` of a timeline.
  Transfer(std::shared_ptr<internal::StreamTimeline> timeline, uint64_t value)
      : timeline_(std::move(timeline)), value_(value) {}

  FenceTicket ticket() const;
  uint64_t number() const { return value_; }  // the ticket's
  bool IsDone() const;                        // as of the last poll; makes no device call

  // Makes later work of `stream` start after this transfer, without blocking the host. Makes no
  // device call if the transfer is known to be done. FailedPrecondition while `stream` captures a
  // graph and the transfer is pending: call Wait() instead.
  absl::Status WaitOn(StreamHandle stream, const WaitSite& site) const;

  // Blocks the host until the transfer is done. DeadlineExceeded after `timeout` names the
  // transfer, and its stream's obstacle where the device knows it.
  absl::Status Wait(absl::Duration timeout) const;

 private:
  std::shared_ptr<internal::StreamTimeline> timeline_;
  uint64_t value_ = 0;
};

class TransferEngine {
 public:
  static absl::StatusOr<std::shared_ptr<TransferEngine>> Create(const EngineOptions& options,
                                                                std::shared_ptr<Device> device);
  virtual ~TransferEngine() = default;

  // Enqueues the batch after the present work of `after`. InvalidArgument if the batch is empty.
  // FailedPrecondition while `after` captures a graph.
  virtual absl::StatusOr<Transfer> Submit(const CopyBatch& batch, StreamHandle after) = 0;

  // Returns a ticket for the present work of a foreign stream, which must live until the ticket is
  // done. FailedPrecondition while the stream captures a graph.
  virtual absl::StatusOr<FenceTicket> Mark(StreamHandle stream) = 0;

  // Makes later work of `later` start after the present work of `earlier`. Never blocks the host.
  // FailedPrecondition while either captures a graph: the other would be drawn into it.
  virtual absl::Status OrderStreams(StreamHandle earlier, StreamHandle later,
                                    const WaitSite& site) = 0;

  // Returns true while `stream` captures a graph: then it can neither be followed nor wait.
  virtual absl::StatusOr<bool> IsCapturing(StreamHandle stream) = 0;

  // Returns the bandwidths and fixed costs of the device's link, for planning transfers. The first
  // call measures them, with borrowed device memory and memory of `allocator` (link_calibration.h);
  // later calls return the same.
  virtual absl::StatusOr<LinkCalibration> Calibrate(PinnedAllocator& allocator) = 0;

  // Asks the device how far both directions have come.
  virtual void Poll() = 0;

  // Blocks until everything submitted so far is done. DeadlineExceeded after `timeout`.
  virtual absl::Status Drain(absl::Duration timeout) = 0;

  // Ends the engine and drains it. From now on Submit, Mark, OrderStreams and calibration return
  // FailedPrecondition. DeadlineExceeded after `timeout`, like Drain. Transfers and tickets can
  // still be waited for; copies that nobody waits for are leaked.
  virtual absl::Status Shutdown(absl::Duration timeout) = 0;

  // Returns OkStatus, or the sticky error that poisoned the engine.
  virtual absl::Status health() const = 0;

  virtual Device& device() const = 0;
  virtual EngineStats GetStats() const = 0;
};

}  // namespace pinion

#endif  // PINION_ENGINE_TRANSFER_ENGINE_H_
