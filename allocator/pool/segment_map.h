// The segments that a source has given, and the pieces that they are lent to arenas in.
//
//   segment  |       |       |       |       |       |     |
//   arenas      A       A       B       B       B       A      pieces of a sixty-fourth, or 2 MiB
//
// A segment may go back to its source when all of its pieces are free.
//
// Thread safety: none of its own; SegmentPool adds the lock.

#ifndef PINION_ALLOCATOR_POOL_SEGMENT_MAP_H_
#define PINION_ALLOCATOR_POOL_SEGMENT_MAP_H_

#include <cstddef>
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
  // Pieces are multiples of `alignment_bytes`, but for the last one of a segment.
  explicit SegmentMap(uint64_t alignment_bytes) : alignment_bytes_(alignment_bytes) {}

  // Adds a segment. Its pieces, by address.
  std::vector<HostSegment> Add(const HostSegment& segment);

  bool Contains(const void* address) const;

  // What is at an address of a segment of `source`.
  SegmentHeap::Border BorderAt(const void* address, const LimitedSource& source) const;
  // The length of the shortest pieces, but for the last ones of segments.
  uint64_t LeastPieceBytes() const;

  // Which segments to take out: the newest first, until their sizes add up to `bytes`.
  struct Removal {
    uint64_t bytes = UINT64_MAX;
    bool all_or_none = false;  // none if they do not add up to that
    uint64_t longer_than_bytes = 0;
  };
  // Takes segments out all of whose pieces are in `free`, which loses those.
  std::vector<HostSegment> RemoveFree(const Removal& wanted,
                                      std::vector<std::vector<HostSegment>>* free);

  uint64_t total_bytes() const { return total_bytes_; }
  // By node; used_bytes is 0.
  std::vector<NumaNodeStats> NumaNodes() const;

 private:
  struct Entry {
    HostSegment segment;
    uint64_t piece_bytes = 0;
    uint64_t number = 0;  // in the order in which they were added
  };

  // The entry that an address is in.
  const Entry& Find(const void* address) const;

  const uint64_t alignment_bytes_;
  std::map<const void*, Entry> segments_;  // by where they begin
  uint64_t added_ = 0;
  uint64_t total_bytes_ = 0;
};

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_POOL_SEGMENT_MAP_H_
