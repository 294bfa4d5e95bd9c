// The segments of a source, and the pieces that arenas use.
//
//   segment  |       |       |       |       |       |     |
//   arenas      A       A       B       B       B       A      pieces of a sixty-fourth, or 2 MiB
//
// A segment may be freed when all of its pieces are free.
//
// Thread safety: none of its own; SegmentPool adds the lock.

#ifndef PINION_ALLOCATOR_POOL_SEGMENT_MAP_H_
#define PINION_ALLOCATOR_POOL_SEGMENT_MAP_H_

#include <cstdint>
#include <map>
#include <vector>

#include "pinion/allocator/allocator_stats.h"
#include "pinion/allocator/heap/segment_heap.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/allocator/pool/limited_source.h"

namespace pinion::internal {

class SegmentMap {
 public:
  // Pieces are multiples of `alignment_bytes`, except the last one of a segment.
  explicit SegmentMap(uint64_t alignment_bytes) : alignment_bytes_(alignment_bytes) {}

  // Adds a segment and returns its pieces by address.
  std::vector<HostSegment> Add(const HostSegment& segment);

  bool Contains(const void* address) const;

  // Describes the border at an address in a segment of `source`.
  SegmentHeap::Border BorderAt(const void* address, const LimitedSource& source) const;
  // Returns the size of the shortest pieces, not counting the last ones of segments.
  uint64_t LeastPieceBytes() const;

  // Selects segments to remove: the newest first, until their sizes add up to `bytes`.
  struct Removal {
    uint64_t bytes = UINT64_MAX;
    bool all_or_none = false;  // remove none if there are not enough
    uint64_t longer_than_bytes = 0;
  };
  // Removes segments whose pieces are all in `free`, and erases those pieces.
  std::vector<HostSegment> RemoveFree(const Removal& wanted,
                                      std::vector<std::vector<HostSegment>>* free);

  uint64_t total_bytes() const { return total_bytes_; }
  // By node. used_bytes is 0.
  std::vector<NumaNodeStats> NumaNodes() const;

 private:
  struct Entry {
    HostSegment segment;
    uint64_t piece_bytes = 0;
    uint64_t number = 0;  // in the order of Add
  };

  // Returns the entry that contains an address.
  const Entry& Find(const void* address) const;

  const uint64_t alignment_bytes_;
  std::map<const void*, Entry> segments_;  // by first address
  uint64_t added_ = 0;
  uint64_t total_bytes_ = 0;
};

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_POOL_SEGMENT_MAP_H_
