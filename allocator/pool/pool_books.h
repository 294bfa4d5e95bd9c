// An arena's books: free memory, live and deferred blocks, and their statistics.
//
//   Take --> live block --Enter-------------------------> free
//                          \--> deferred --Reclaim--------^
//
// Thread safety: none of its own; Arena adds the lock. Calls JoinsAt of a source and Completed of a
// timeline, which only compute.

#ifndef PINION_ALLOCATOR_POOL_POOL_BOOKS_H_
#define PINION_ALLOCATOR_POOL_POOL_BOOKS_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/attributes.h"
#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "pinion/allocator/allocator_stats.h"
#include "pinion/allocator/fence.h"
#include "pinion/allocator/heap/block_records.h"
#include "pinion/allocator/heap/hardening.h"
#include "pinion/allocator/heap/segment_heap.h"
#include "pinion/allocator/heap/size_class.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/allocator/pool/release_buffers.h"

namespace pinion::internal {

// Released blocks that wait for tickets: one heap per timeline, ordered by ticket value.
//
//   timeline A (completed 7)   8: block  |  9: block  |  9: block
//   timeline B (stuck at 2)    3: block
//
// A block that waits for several timelines is in the heap of each. A reclaim loads one atomic
// counter per timeline and touches only the blocks that it frees. A stuck timeline holds back only
// its own blocks.
//
// Thread safety: none of its own. Calls FenceTimeline::Completed only. Ownership: shares each
// timeline while a block waits for it. Destroying the last reference may destroy a device's stream.
// So a caller with a lock receives the references in `retired`, and drops them after the unlock.
class DeferredReleases {
 public:
  using Timelines = absl::InlinedVector<std::shared_ptr<FenceTimeline>, 4>;
  // One ticket for each timeline, in the order in which blocks began to wait: the order of waits
  // must not depend on addresses.
  using NextTickets = std::vector<FenceTicket>;

  // Makes room for `count` calls of Add with `timeline`, which then need no memory. Returns false
  // if the C++ heap is full.
  bool MakeRoom(const std::shared_ptr<FenceTimeline>& timeline, size_t count);

  // Makes `block` wait for `value` of `timeline`, in addition to its earlier tickets. Requires
  // MakeRoom.
  void Add(BlockRecord* block, const std::shared_ptr<FenceTimeline>& timeline, uint64_t value);

  // Calls `done` with each block whose tickets are all done.
  void TakeDone(absl::FunctionRef<void(BlockRecord*)> done, Timelines* retired);

  // Lowers the values of `next` to the next ticket of each timeline, and adds missing timelines.
  void AddNextTickets(NextTickets* next) const;

 private:
  struct Entry {
    uint64_t value = 0;
    BlockRecord* block = nullptr;
  };
  struct Queue {
    std::shared_ptr<FenceTimeline> timeline;
    std::vector<Entry> heap;  // the smallest value first
  };

  Queue* QueueOf(const std::shared_ptr<FenceTimeline>& timeline);  // null if there is none

  // A queue may be empty until TakeDone, if MakeRoom was not followed by Add.
  std::vector<Queue> queues_;
};

class PoolBooks {
 public:
  // `arena` is the owner.
  PoolBooks(uint64_t alignment_bytes, uint64_t segment_bytes, Arena* arena);

  // Returns a live block for a request of `size_bytes`. Null if no free block has `class_bytes`.
  BlockRecord* Take(uint64_t size_bytes, uint64_t class_bytes);

  // In hardened builds, dies if the block is not live.
  void MarkReleased(BlockRecord* block, uint64_t id);

  // Frees a live block. Dies if it is not live.
  void Enter(BlockRecord* block, uint64_t id);
  // Like the above, but defers the block if its ticket is above `completed`, the timeline's count.
  // Returns false, and changes nothing, if the C++ heap has no memory for the ticket.
  bool Enter(const ReleaseBatch::Release& release, const std::shared_ptr<FenceTimeline>& timeline,
             uint64_t completed);
  // Makes room for `count` more tickets of a timeline. Returns false if the C++ heap is full.
  bool MakeRoomToDefer(const std::shared_ptr<FenceTimeline>& timeline, size_t count) {
    return deferred_.MakeRoom(timeline, count);
  }
  // Makes the block wait for one more ticket. Requires MakeRoomToDefer.
  void Defer(BlockRecord* block, const std::shared_ptr<FenceTimeline>& timeline, uint64_t value);
  // Frees blocks whose tickets are done.
  void Reclaim(DeferredReleases::Timelines* retired);
  // Like DeferredReleases::AddNextTickets.
  void AddNextTickets(DeferredReleases::NextTickets* next) const { deferred_.AddNextTickets(next); }
  bool some_deferred() const { return deferred_bytes_.current != 0; }

  // Adds segments, then takes a block like Take and counts a miss. Takes none if `size_bytes` is 0.
  BlockRecord* AddSegments(absl::Span<const HostSegment> segments, SegmentHeap::BorderAt border_at,
                           uint64_t size_bytes, uint64_t class_bytes);
  std::vector<HostSegment> RemoveFreeSegments(uint64_t bytes, uint64_t hole_bytes = kMinBlockBytes);
  std::vector<HostSegment> FreeEnds() { return heap_.FreeEnds(); }
  std::vector<HostSegment> RemoveFreeEnd(const HostSegment& range);

  // Returns the free bytes for blocks that are not small.
  uint64_t RoomForLargeBlocks();
  uint64_t memory_bytes() const { return heap_.segment_bytes(); }
  uint64_t live_blocks() const { return allocations() - releases_; }

  // Adds the counters and gauges of these books, and the used bytes of the `numa_nodes` that `sum`
  // has. Lists all size buckets. The sum of peaks is an upper bound, because they may be of
  // different times.
  void AddStats(AllocatorStats* sum) const;

 private:
  // Hardened builds mark a block as released at once. Other builds detect a double release when
  // they enter it.
  static constexpr BlockState kStateOnEntry = kHardened ? BlockState::kReleased : BlockState::kLive;

  // Bytes that came and went, and their highest difference.
  struct Flow {
    uint64_t current() const { return came - went; }
    void NotePeak() { peak = std::max(peak, current()); }
    ByteGauge ToGauge() const { return {current(), std::max(peak, current()), came}; }

    uint64_t came = 0;
    uint64_t went = 0;
    uint64_t peak = 0;  // updated before bytes go
  };
  // The counters of SizeBucketStats for one doubling.
  struct Bucket {
    uint64_t allocations = 0;
    Flow booked_bytes;
  };

  static unsigned IndexOf(uint64_t class_bytes) { return FloorLog2(class_bytes) - kMinBlockLog2; }
  uint64_t allocations() const;
  void TakeIds();
  void CountRelease(BlockRecord* block, uint64_t id);
  // Record the peaks of gauges that are about to fall: NoteBeforeRise before an allocation, and
  // NoteBeforeFall before a release.
  void NoteBeforeRise();
  void NoteBeforeFall();
  uint64_t used_bytes() const { return heap_.used_bytes(); }
  uint64_t booked_bytes() const { return used_bytes() - deferred_bytes_.current; }
  uint64_t cached_bytes() const { return heap_.segment_bytes() - used_bytes(); }

  // Counters that each allocation changes. AddStats() derives the rest.
  bool falls_ = false;  // whether blocks were released since the last allocation
  uint64_t releases_ = 0;
  uint64_t next_id_ = 0;
  uint64_t end_of_ids_ = 0;
  Flow requested_bytes_;
  uint64_t peak_booked_bytes_ = 0;
  uint64_t peak_used_bytes_ = 0;
  uint64_t peak_cached_bytes_ = 0;
  SegmentHeap heap_;
  std::array<Bucket, kLevels> buckets_;

  DeferredReleases deferred_;
  ByteGauge deferred_bytes_;
  uint64_t grown_bytes_ = 0;                // of blocks that came with a new segment
  std::array<uint64_t, kLevels> misses_{};  // by bucket
};

// --- What every allocation and release does, in line ---

ABSL_ATTRIBUTE_ALWAYS_INLINE inline BlockRecord* PoolBooks::Take(uint64_t size_bytes,
                                                                 uint64_t class_bytes) {
  if (falls_) NoteBeforeRise();
  BlockRecord* const block = heap_.Take(class_bytes);
  if (block == nullptr) [[unlikely]]
    return nullptr;
  if (next_id_ == end_of_ids_) [[unlikely]]
    TakeIds();
  block->id = next_id_++;
  block->size_bytes = size_bytes;
  requested_bytes_.came += size_bytes;
  Bucket& bucket = buckets_[IndexOf(class_bytes)];
  ++bucket.allocations;
  bucket.booked_bytes.came += class_bytes;
  return block;
}

ABSL_ATTRIBUTE_ALWAYS_INLINE inline void PoolBooks::Enter(BlockRecord* block, uint64_t id) {
  CountRelease(block, id);
  heap_.Put(block);
}

ABSL_ATTRIBUTE_ALWAYS_INLINE inline void PoolBooks::CountRelease(BlockRecord* block, uint64_t id) {
  CheckReleased(*block, id, kStateOnEntry);
  if (!falls_) NoteBeforeFall();
  ++releases_;
  requested_bytes_.went += block->size_bytes;
  Flow& booked = buckets_[IndexOf(block->capacity_bytes)].booked_bytes;
  booked.NotePeak();
  booked.went += block->capacity_bytes;
}

inline void PoolBooks::NoteBeforeRise() {
  falls_ = false;
  peak_cached_bytes_ = std::max(peak_cached_bytes_, cached_bytes());
}

inline void PoolBooks::NoteBeforeFall() {
  falls_ = true;
  requested_bytes_.NotePeak();
  peak_booked_bytes_ = std::max(peak_booked_bytes_, booked_bytes());
  peak_used_bytes_ = std::max(peak_used_bytes_, used_bytes());
}

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_POOL_POOL_BOOKS_H_
