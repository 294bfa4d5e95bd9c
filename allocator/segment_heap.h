// Cuts segments into blocks and joins them again: segregated fit with immediate coalescing.
//
//   segment  |--used--|-free-|--used--|---------free---------|
//               ^ before/after: neighbours by address ^
//
// It never touches the memory it manages (tests give it made-up addresses), asks nobody for more,
// and knows no tickets: SegmentPool adds those, and the lock. All but AddSegment,
// RemoveFreeSegments and NumaNodes take constant time.
//
// Thread safety: none of its own.

#ifndef PINION_ALLOCATOR_SEGMENT_HEAP_H_
#define PINION_ALLOCATOR_SEGMENT_HEAP_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "pinion/allocator/allocator_stats.h"
#include "pinion/allocator/free_lists.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/allocator/segment.h"

namespace pinion::internal {

class SegmentHeap {
 public:
  SegmentHeap() = default;
  SegmentHeap(const SegmentHeap&) = delete;
  SegmentHeap& operator=(const SegmentHeap&) = delete;

  // `small` segments serve small classes only, the others all other classes.
  void AddSegment(const HostSegment& memory, bool small);

  // A block of exactly `class_bytes`, a result of RoundUpToSizeClass; its state is kLive. Null if
  // no free block is large enough.
  BlockRecord* Take(uint64_t class_bytes);

  // Makes a live or deferred block free, and joins it with its free neighbours.
  void Put(BlockRecord* block);

  // Takes wholly free segments out, the newest first, until their sizes add up to `bytes`.
  std::vector<HostSegment> RemoveFreeSegments(uint64_t bytes, bool keep_small = false);

  // Of all segments, by node. Looks at each.
  std::vector<NumaNodeStats> NumaNodes() const;

  uint64_t segment_bytes() const { return segment_bytes_; }
  // Free bytes that can serve what is not small.
  uint64_t large_free_bytes() const { return large_free_bytes_; }

 private:
  BlockRecord* NewRecord();
  void Recycle(BlockRecord* block);
  void InsertFree(BlockRecord* block);
  void RemoveFree(BlockRecord* block);
  // `lower` takes over `upper`, its neighbour.
  void Join(BlockRecord* lower, BlockRecord* upper);

  FreeLists small_;
  FreeLists large_;
  std::vector<std::unique_ptr<Segment>> segments_;
  uint64_t segment_bytes_ = 0;
  uint64_t large_free_bytes_ = 0;

  std::vector<std::unique_ptr<BlockRecord[]>> record_chunks_;
  BlockRecord* unused_records_ = nullptr;
};

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_SEGMENT_HEAP_H_
