// The books of an arena: what is free, which blocks are live or wait for tickets, and the
// statistics of that.
//
//   Take --> live block --Enter-------------------------> free
//                          \--> deferred --Reclaim--------^
//
// Thread safety: none of its own; Arena adds the lock. Of a source JoinsAt is called, and of
// a timeline Completed, which only compute.

#ifndef PINION_ALLOCATOR_POOL_POOL_BOOKS_H_
#define PINION_ALLOCATOR_POOL_POOL_BOOKS_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/attributes.h"
#include "absl/types/span.h"
#include "pinion/allocator/allocator_stats.h"
#include "pinion/allocator/fence.h"
#include "pinion/allocator/heap/hardening.h"
#include "pinion/allocator/heap/segment.h"
#include "pinion/allocator/heap/segment_heap.h"
#include "pinion/allocator/heap/size_class.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/allocator/pool/deferred_releases.h"
#include "pinion/allocator/pool/release_buffers.h"

namespace pinion::internal {

class PoolBooks {
 public:
  // How an allocation came by its block.
  enum class Way { kCached, kPolled, kWaited, kGrown };

  // Those of one arena.
  PoolBooks(uint64_t alignment_bytes, uint64_t segment_bytes, Arena* arena);

  // A live block for a request of `size_bytes`; null if no free one has `class_bytes`.
  BlockRecord* Take(uint64_t size_bytes, uint64_t class_bytes, Way way);

  // Hardened builds: dies if the block is not live.
  void MarkReleased(BlockRecord* block, uint64_t id);

  // A live block becomes free. Dies if it is not live.
  void Enter(BlockRecord* block, uint64_t id);
  // The same, or it waits for its ticket if `completed`, which is of its timeline, is less. False
  // where the C++ heap has no memory to note that: then nothing has happened.
  bool Enter(const ReleaseBatch::Release& release, const std::shared_ptr<FenceTimeline>& timeline,
             uint64_t completed);
  // So that `count` more tickets of a timeline can be waited for. False as above.
  bool MakeRoomToDefer(const std::shared_ptr<FenceTimeline>& timeline, size_t count) {
    return deferred_.MakeRoom(timeline, count);
  }
  // The block waits for one more ticket, for which room was made.
  void Defer(BlockRecord* block, const std::shared_ptr<FenceTimeline>& timeline, uint64_t value);
  // Blocks whose tickets are done become free.
  void Reclaim(DeferredReleases::Timelines* retired);
  // What deferred blocks wait for next: one ticket per timeline.
  std::vector<FenceTicket> NextTickets() const { return deferred_.NextTickets(); }
  bool some_deferred() const { return deferred_bytes_.current != 0; }

  // Adds segments, and takes a block then as Take does; size 0: none.
  BlockRecord* AddSegments(absl::Span<const HostSegment> segments, SegmentHeap::BorderAt border_at,
                           uint64_t size_bytes, uint64_t class_bytes, Way way);
  std::vector<HostSegment> RemoveFreeSegments(uint64_t bytes, uint64_t hole_bytes = kMinBlockBytes);
  std::vector<HostSegment> FreeEnds() { return heap_.FreeEnds(); }
  std::vector<HostSegment> RemoveFreeEnd(const HostSegment& range);
  bool HasFree(uint64_t bytes) const { return heap_.HasFree(bytes); }

  // Free bytes that can serve blocks that are not small.
  uint64_t RoomForLargeBlocks();
  uint64_t memory_bytes() const { return heap_.segment_bytes(); }
  uint64_t live_blocks() const { return allocations() - releases_; }

  void CountWait() { ++stats_.waits_for_deferred; }
  // Of these books: what is locked, and how often memory went back, is the pool's to add.
  AllocatorStats Stats() const;

 private:
  // Hardened builds mark a block as released at once; others find a second release when they enter
  // it.
  static constexpr BlockState kStateOnEntry = kHardened ? BlockState::kReleased : BlockState::kLive;

  // What ever came, what went of it again, and the most that was there at a time.
  struct Flow {
    uint64_t current() const { return came - went; }
    void NotePeak() { peak = std::max(peak, current()); }
    ByteGauge ToGauge() const { return {current(), std::max(peak, current()), came}; }

    uint64_t came = 0;
    uint64_t went = 0;
    uint64_t peak = 0;  // noted before something goes
  };
  // What SizeBucketStats tells, of one doubling.
  struct Bucket {
    uint64_t allocations = 0;
    Flow booked_bytes;
  };

  static unsigned IndexOf(uint64_t class_bytes) { return FloorLog2(class_bytes) - kMinBlockLog2; }
  uint64_t allocations() const;
  void TakeIds();
  void CountWay(Way way, const BlockRecord& block);
  void CountRelease(BlockRecord* block, uint64_t id);
  // What is in use rises with the next allocation, or falls with the next release: notes the peaks
  // of what falls then.
  void NoteBeforeRise();
  void NoteBeforeFall();
  uint64_t used_bytes() const { return heap_.used_bytes(); }
  uint64_t booked_bytes() const { return used_bytes() - deferred_bytes_.current; }
  uint64_t cached_bytes() const { return heap_.segment_bytes() - used_bytes(); }

  // What each allocation counts; Stats() derives the rest.
  bool falls_ = false;  // what is in use: since something was allocated last
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
  uint64_t grown_bytes_ = 0;                // of blocks that were taken along with a new segment
  std::array<uint64_t, kLevels> misses_{};  // by bucket
  AllocatorStats stats_;                    // what is counted seldom
};

// --- What every allocation and release does, in line ---

ABSL_ATTRIBUTE_ALWAYS_INLINE inline BlockRecord* PoolBooks::Take(uint64_t size_bytes,
                                                                 uint64_t class_bytes, Way way) {
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
  if (way != Way::kCached) [[unlikely]]
    CountWay(way, *block);
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
