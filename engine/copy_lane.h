// One direction of an engine: a stream, its timeline, and how a batch gets onto it.
//
//   batch ── merge neighbours ──> chunks ──> (wait for room) ──> stream
//
// Only batches to the device wait for room, and of these only the ones whose callers leave flow
// control to the engine (copy_batch.h).
//
// The first chunk is ordered after the batch's compute stream and after the work of other timelines
// that touches its host buffers, copies of the other direction above all; where such a timeline has
// no events the host waits, without a turn, so that others go ahead. The rest follows in the order
// of the stream, and the last one's number stands for all of them, except where the next one waits
// for room or each is timed. Threads take turns per chunk, in the order in which they came: a small
// batch waits for a window and for one chunk of each thread before it, not for all of a large one;
// for room, it may wait for all of a batch that does not wait for room itself.
// A batch that does not wait for room does not wait for those that do, either: it may go ahead of
// them, and what it enqueues between a chunk's wait and the chunk itself comes on top of the
// window.
//
// Thread safety: thread-safe.

#ifndef PINION_ENGINE_COPY_LANE_H_
#define PINION_ENGINE_COPY_LANE_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/base/thread_slot.h"
#include "pinion/allocator/fence.h"
#include "pinion/device/device.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/engine/stream/event_pool.h"
#include "pinion/engine/stream/fifo_turn.h"
#include "pinion/engine/stream/guarded_device.h"
#include "pinion/engine/stream/stream_timeline.h"
#include "pinion/engine/stream/transfer_timer.h"
#include "pinion/engine/stream/wait_site.h"

namespace pinion::internal {

// A copy starts after the work that its batch was submitted after.
inline constexpr WaitSite kCopyAfterCompute("kCopyAfterCompute", kEngineWaits);
// A copy starts after earlier work on its host buffer: copies of the other direction, and whatever
// else has left a ticket there.
inline constexpr WaitSite kCopyAfterHostBuffer("kCopyAfterHostBuffer", kEngineWaits);
// The host waits until bytes in flight to the device are below the bound.
inline constexpr WaitSite kFlowControl("kFlowControl", kEngineWaits);
// The host waits for the chunks of a batch whose next one has failed.
inline constexpr WaitSite kFailedBatch("kFailedBatch", kEngineWaits);

class CopyLane {
 public:
  struct Options {
    uint64_t window_bytes = 0;  // in flight at most, for batches that wait for room
    uint64_t chunk_bytes = 0;  // at most half of the window: one is enqueued while one is under way
  };

  // Makes the stream.
  static absl::StatusOr<std::unique_ptr<CopyLane>> Create(const Options& options,
                                                          CopyDirection direction,
                                                          std::shared_ptr<GuardedDevice> device,
                                                          std::shared_ptr<EventPool> events);

  // Times the chunks, and the waits for them. Before the first Submit.
  void SetTimer(std::shared_ptr<TransferTimer> timer);

  // As TransferEngine::Submit. Returns the number of the last chunk.
  absl::StatusOr<uint64_t> Submit(const CopyBatch& batch, StreamHandle after);

  // Returns when nobody has a turn that was let in, and all that was sent has a number. A Submit
  // that still waits for room, or for its turn, is refused when it gets there.
  void FinishTurns();

  const std::shared_ptr<StreamTimeline>& timeline() const { return timeline_; }
  // The same, with a count of references that threads of one group share: those of a saved tensor
  // change a dozen times, and one count would move from processor to processor each time.
  const std::shared_ptr<StreamTimeline>& timeline_of_thread() const {
    return timeline_by_group_[ThreadSlotIfAny() % timeline_by_group_.size()];
  }

 private:
  struct Progress;  // of one Submit

  CopyLane(const Options& options, CopyDirection direction, std::shared_ptr<GuardedDevice> device,
           std::shared_ptr<EventPool> events, std::shared_ptr<StreamTimeline> timeline);

  absl::Status SubmitChunkWithinWindow(Progress& progress);
  absl::Status SubmitChunk(Progress& progress);
  // Gives what was sent of the batch its number, within a turn.
  void Number(Progress& progress);
  absl::Status WaitForRoom(uint64_t size_bytes);
  absl::StatusOr<Prerequisites> OrderBatch(Progress& progress);
  // The number of `other` that the lane's stream waits for already; 0: none.
  uint64_t& WaitsFor(const std::shared_ptr<FenceTimeline>& other);
  // Nothing of a batch that failed with `error` is written once this has returned.
  absl::Status EndFailedBatch(Progress& progress, const absl::Status& error);

  const Options options_;
  const CopyDirection direction_;
  const std::shared_ptr<GuardedDevice> device_;
  const std::shared_ptr<EventPool> events_;
  const std::shared_ptr<StreamTimeline> timeline_;
  std::array<std::shared_ptr<StreamTimeline>, 8> timeline_by_group_;  // of as many threads
  FifoTurn room_turn_;
  std::atomic<int> open_batches_{0};      // that a turn has left with chunks without a number
  std::shared_ptr<TransferTimer> timer_;  // null: nothing is timed
  // The highest number of each other timeline that the lane's stream waits for already. Within a
  // turn of the timeline.
  std::vector<std::pair<std::weak_ptr<FenceTimeline>, uint64_t>> waits_for_;
};

}  // namespace pinion::internal

#endif  // PINION_ENGINE_COPY_LANE_H_
