// Submits copy batches of one direction: one copy stream, its timeline, and chunking.
//
//   batch ── merge neighbours ──> chunks ──> stream
//
// The first chunk starts after the compute stream's present work, and after other timelines' work
// on its host buffers, mainly copies of the other direction. If such a timeline has no events, the
// host waits outside the turn. The other chunks follow in stream order. The last chunk's number
// covers all of them. Exception: chunks that are timed have numbers of their own.
//
// Threads take turns per chunk, in order of arrival. So a small batch waits for one chunk of each
// earlier thread, not for all of a large batch.
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

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "pinion/allocator/base/thread_slot.h"
#include "pinion/allocator/fence.h"
#include "pinion/device/device.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/engine/stream/event_pool.h"
#include "pinion/engine/stream/guarded_device.h"
#include "pinion/engine/stream/stream_timeline.h"
#include "pinion/engine/stream/transfer_timer.h"
#include "pinion/engine/stream/wait_site.h"

namespace pinion::internal {

// A piece costs the host and the link about a microsecond, so merging two neighbours saves time. A
// batch copies the concatenation of its pieces by ascending destination, merged or not. A chunk is
// a range of those bytes.

// Most batches have one piece, in one block.
using CopyPieces = absl::InlinedVector<CopyPiece, 1>;
using HostBlocks = absl::InlinedVector<const void*, 1>;

// Returns the pieces by ascending destination.
CopyPieces SortPieces(absl::Span<const CopyPiece> pieces);

// Returns as few pieces as possible that copy the same bytes, by ascending destination.
// Destinations must not overlap. `host_blocks` are the starts of the host's blocks, which are not
// merged with each other. Two that touch may belong to two pinned segments, and CUDA copies no
// piece across segments.
CopyPieces CoalescePieces(absl::Span<const CopyPiece> pieces, HostBlocks host_blocks);

// Returns pieces for at least one and at most `max_bytes` bytes, from `begin_bytes` on. Where
// possible, a piece is cut at a multiple of 4 KiB from its beginning, so that its parts keep its
// alignment. begin_bytes must lie inside, and max_bytes be positive.
CopyPieces SlicePieces(absl::Span<const CopyPiece> pieces, uint64_t begin_bytes,
                       uint64_t max_bytes);

uint64_t TotalBytes(absl::Span<const CopyPiece> pieces);

// A copy starts after the compute stream's work at its submission.
inline constexpr WaitSite kCopyAfterCompute("kCopyAfterCompute", kEngineWaits);
// A copy starts after all work with a ticket on its host buffers, such as copies the other way.
inline constexpr WaitSite kCopyAfterHostBuffer("kCopyAfterHostBuffer", kEngineWaits);
// After a chunk has failed, the host waits for the earlier chunks of its batch.
inline constexpr WaitSite kFailedBatch("kFailedBatch", kEngineWaits);

class CopyLane {
 public:
  // Creates the lane and its stream. Chunks have at most `chunk_bytes` bytes, which is positive.
  static absl::StatusOr<std::unique_ptr<CopyLane>> Create(uint64_t chunk_bytes,
                                                          CopyDirection direction,
                                                          std::shared_ptr<GuardedDevice> device,
                                                          std::shared_ptr<EventPool> events);

  // Times the chunks and the waits for them. Call it before the first Submit.
  void SetTimer(std::shared_ptr<TransferTimer> timer);

  // Like TransferEngine::Submit. Returns the number of the last chunk.
  absl::StatusOr<uint64_t> Submit(const CopyBatch& batch, StreamHandle after);

  // Returns once all accepted turns have ended and every sent chunk has a number. A Submit that
  // still waits for its turn is refused later.
  void FinishTurns();

  const std::shared_ptr<StreamTimeline>& timeline() const { return timeline_; }
  // Returns the same timeline, with a reference count shared by a group of threads. A saved tensor
  // changes the count a dozen times, and one count for all threads would bounce between processors.
  const std::shared_ptr<StreamTimeline>& timeline_of_thread() const {
    return timeline_by_group_[ThreadSlotIfAny() % timeline_by_group_.size()];
  }

 private:
  struct Progress;  // of one Submit

  CopyLane(uint64_t chunk_bytes, CopyDirection direction, std::shared_ptr<GuardedDevice> device,
           std::shared_ptr<EventPool> events, std::shared_ptr<StreamTimeline> timeline);

  absl::Status SubmitChunk(Progress& progress);
  // Numbers the sent chunks of the batch, within a turn.
  void Number(Progress& progress);
  absl::StatusOr<Prerequisites> OrderBatch(Progress& progress);
  // Returns the number of `other` that the lane's stream already waits for; 0: none.
  uint64_t& WaitsFor(const std::shared_ptr<FenceTimeline>& other);
  // Ensures that nothing of a batch that failed with `error` is written after the return.
  absl::Status EndFailedBatch(Progress& progress, const absl::Status& error);

  const uint64_t chunk_bytes_;
  const CopyDirection direction_;
  const std::shared_ptr<GuardedDevice> device_;
  const std::shared_ptr<EventPool> events_;
  const std::shared_ptr<StreamTimeline> timeline_;
  std::array<std::shared_ptr<StreamTimeline>, 8> timeline_by_group_;  // by group of threads
  std::atomic<int> open_batches_{0};      // batches with sent chunks that have no number
  std::shared_ptr<TransferTimer> timer_;  // null: nothing is timed
  // Highest number of each other timeline that the lane's stream already waits for. Used within a
  // turn of the timeline.
  std::vector<std::pair<std::weak_ptr<FenceTimeline>, uint64_t>> waits_for_;
};

}  // namespace pinion::internal

#endif  // PINION_ENGINE_COPY_LANE_H_
