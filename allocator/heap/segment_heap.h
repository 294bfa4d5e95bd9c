// Cuts segments into blocks and joins them again: segregated fit with immediate coalescing.
//
//   run  |--used--|-free-|--used--|---------free---------|--used--|
//           ^ before/after: neighbours by address ^
//         '------- segment -------'------- segment --------'
//
// A run is one segment, or several that lie side by side and may be joined.
//
// Small blocks are cut from slabs, which are blocks themselves, so that a small block that lives
// long does not cut a large hole in two. Slabs that have become free serve until a large block
// needs their room.
//
// It never touches the memory it manages (tests give it made-up addresses), asks nobody for more,
// and knows no tickets: Arena adds those, and the lock. Take and Put take constant time (Take
// of a large block that does not fit looks at the slabs); the others look at all segments, and at
// the blocks of runs that they join or part.
//
// Thread safety: none of its own.

#ifndef PINION_ALLOCATOR_HEAP_SEGMENT_HEAP_H_
#define PINION_ALLOCATOR_HEAP_SEGMENT_HEAP_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "pinion/allocator/allocator_stats.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/heap/block_records.h"
#include "pinion/allocator/heap/free_lists.h"
#include "pinion/allocator/heap/segment.h"
#include "pinion/allocator/host_memory_source.h"

namespace pinion::internal {

class SegmentHeap {
 public:
  using JoinsAt = absl::FunctionRef<bool(const void* border)>;

  // `alignment_bytes`: of blocks that are not small, whose classes are multiples of it; a power of
  // two, at least 4096. `slab_bytes`: of slabs, where a segment has that much room. `arena`: what
  // the records say that they belong to.
  SegmentHeap(uint64_t alignment_bytes, uint64_t slab_bytes, Arena* arena = nullptr)
      : alignment_bytes_(alignment_bytes),
        slab_bytes_(AlignUp(slab_bytes, alignment_bytes)),
        records_(arena) {}
  SegmentHeap(const SegmentHeap&) = delete;
  SegmentHeap& operator=(const SegmentHeap&) = delete;

  // `joins_at` says whether a block may cross the border between this and a neighbouring segment.
  void AddSegment(const HostSegment& memory, JoinsAt joins_at);

  // A block of exactly `class_bytes`, a result of RoundUpToSizeClass; its state is kLive. Null if
  // no free block is large enough.
  BlockRecord* Take(uint64_t class_bytes);

  // Takes a live, released or deferred block back, at once whole with its free neighbours.
  void Put(BlockRecord* block);

  // Makes slabs that are wholly free room for large blocks again.
  void DissolveFreeSlabs();

  // Takes wholly free segments out, those of the newest runs first, until their sizes add up to
  // `bytes`.
  std::vector<HostSegment> RemoveFreeSegments(uint64_t bytes = UINT64_MAX);

  // Of all segments, by node. Looks at each.
  std::vector<NumaNodeStats> NumaNodes() const;

  uint64_t segment_bytes() const { return segment_bytes_; }
  // Free bytes outside of slabs.
  uint64_t large_free_bytes() const { return large_free_bytes_; }

 private:
  // The first `bytes` of a free block, as a block that is in no list; what is left stays free.
  BlockRecord* Carve(BlockRecord* free, uint64_t bytes);
  // Makes a block with room for `class_bytes` a slab, if there is one.
  void AddSlab(uint64_t class_bytes);
  // A run of one segment that is one free block.
  std::unique_ptr<Run> NewRun(const HostSegment& memory, BlockRecord* slab);
  // `lower` takes over `upper`, which begins where it ends, and is empty then.
  void JoinRuns(Run& lower, Run& upper);
  // Takes segment `index`, which lies in the free block `around`, out of the run, which becomes two
  // if that is in its midst.
  void RemoveSegment(Run& run, size_t index, BlockRecord* around);
  // To a run that already has them in its chain.
  void MoveBlocks(Run& from, Run& to);
  // Makes a used block free, and joins it with its free neighbours.
  void Free(BlockRecord* block);
  // Of a free block that grows or shrinks at one of its ends.
  void ResizeFree(BlockRecord* block, uint64_t capacity_bytes);

  // Without neighbours, and in no list.
  BlockRecord* NewBlock(char* data, uint64_t capacity_bytes, Run& run);
  void InsertFree(BlockRecord* block);
  void RemoveFree(BlockRecord* block);
  // Out of the chain of neighbours, and unused from there on.
  void Unlink(BlockRecord* block);

  FreeLists small_;
  FreeLists large_;
  const uint64_t alignment_bytes_;
  const uint64_t slab_bytes_;
  std::vector<std::unique_ptr<Run>> runs_;
  std::vector<std::unique_ptr<Run>> slabs_;
  uint64_t segment_bytes_ = 0;
  uint64_t large_free_bytes_ = 0;
  BlockRecords records_;
};

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_HEAP_SEGMENT_HEAP_H_
