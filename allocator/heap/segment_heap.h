// Cuts segments into blocks: segregated fit with immediate coalescing.
//
//   run  |--used--|-free-|--used--|---------free---------|--used--|
//           ^ before/after: neighbours by address ^
//         '------- segment -------'------- segment --------'
//
// A run is one segment, or several adjacent ones that may be joined.
//
// Small blocks are cut from slabs, which are blocks themselves, so that a long-lived small block
// does not split a large hole. A free slab is kept until a large block needs its memory.
//
// The heap never touches the memory that it manages, and does not grow by itself. It has no lock
// and knows no tickets: Arena adds them. Take and Put take constant time. (Take of a large block
// that does not fit visits the slabs.) All other functions visit all segments or all holes.
//
// Thread safety: none of its own.

#ifndef PINION_ALLOCATOR_HEAP_SEGMENT_HEAP_H_
#define PINION_ALLOCATOR_HEAP_SEGMENT_HEAP_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "absl/base/attributes.h"
#include "absl/functional/function_ref.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/heap/block_records.h"
#include "pinion/allocator/heap/free_lists.h"
#include "pinion/allocator/heap/size_class.h"
#include "pinion/allocator/host_memory_source.h"

namespace pinion::internal {

// Contiguous memory that is cut into blocks: adjacent segments, or a slab. A slab is a block of
// another run, which is cut into small blocks.
struct Run {
  Run() {
    ends.state = BlockState::kEnds;
    ends.before = &ends;
    ends.after = &ends;
  }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  std::vector<HostSegment> segments;  // by address, of one NUMA node; or the slab
  BlockRecord ends;                   // closes the ring of neighbours
  BlockRecord* slab = nullptr;        // the slab's own block; null for segments
};

class SegmentHeap {
 public:
  // What happens where one segment ends and another begins.
  enum class Border {
    kCloses,  // no block may cross it
    kOpen,    // a block may cross it
    kGone,    // the segments are joined: they were cut from one
  };
  using BorderAt = absl::FunctionRef<Border(const void* border)>;

  // `alignment_bytes` is for blocks that are not small, whose classes are multiples of it: a power
  // of two, at least 4096. `slab_bytes` is the size of a slab where a segment has room for it.
  // `arena` is the owner that the records report.
  SegmentHeap(uint64_t alignment_bytes, uint64_t slab_bytes, Arena* arena = nullptr)
      : records_(arena),
        alignment_bytes_(alignment_bytes),
        bytes_per_slab_(AlignUp(slab_bytes, alignment_bytes)) {}
  SegmentHeap(const SegmentHeap&) = delete;
  SegmentHeap& operator=(const SegmentHeap&) = delete;

  // Calls `border_at` where `memory` touches other segments.
  void AddSegment(const HostSegment& memory, BorderAt border_at);

  // Returns a live block of exactly `class_bytes`, a result of RoundUpToSizeClass. Null if no free
  // block is large enough.
  BlockRecord* Take(uint64_t class_bytes);

  // Frees a live, released or deferred block, and joins it with its free neighbours.
  void Put(BlockRecord* block);

  // Turns free slabs back into free large blocks.
  void DissolveFreeSlabs();

  // Removes free segments until their sizes add up to `bytes`, from the upper end of each run down.
  // Searches holes of at least `hole_bytes`.
  std::vector<HostSegment> RemoveFreeSegments(uint64_t bytes = UINT64_MAX,
                                              uint64_t hole_bytes = kMinBlockBytes);

  // Returns the free ends of runs, each as one segment. They may be continued in another heap.
  std::vector<HostSegment> FreeEnds();
  // Removes a free end of a run that overlaps `range`, and cuts a segment that is partly used.
  // Returns the parts by address, or nothing if there is no such end.
  std::vector<HostSegment> RemoveFreeEnd(const HostSegment& range);

  // Returns the used bytes of each node with segments. Visits all runs, and all blocks if there are
  // several nodes.
  std::map<int, uint64_t> UsedBytesByNode() const;

  uint64_t segment_bytes() const { return segment_bytes_; }
  // Bytes of blocks that were taken and not put back.
  uint64_t used_bytes() const { return large_.used_bytes + small_.used_bytes; }
  // Free bytes outside of slabs.
  uint64_t large_free_bytes() const { return segment_bytes_ - slab_bytes_ - large_.used_bytes; }

 private:
  // Either the blocks outside of slabs, or the blocks in slabs.
  struct Part {
    uint64_t used_bytes = 0;
    FreeLists free;
  };
  Part& PartOf(uint64_t class_bytes) { return IsSmallClass(class_bytes) ? small_ : large_; }

  // Makes or dissolves slabs, and searches again.
  BlockRecord* FindAfterAll(uint64_t class_bytes);
  // Cuts the first `bytes` off a free block. The result is in no list, and the rest stays free.
  BlockRecord* Carve(FreeLists& lists, BlockRecord* free, uint64_t bytes);
  // Turns a free block with room for `class_bytes` into a slab, if there is one. Changes nothing if
  // it throws std::bad_alloc.
  void AddSlab(uint64_t class_bytes);
  // Makes a run of one segment, which is one free block of `part`.
  std::unique_ptr<Run> NewRun(const HostSegment& memory, Part& part);
  // Moves `upper`, which begins where `lower` ends, into `lower`.
  void JoinRuns(Run& lower, Run& upper, Border border);
  // Removes segment `index`, which lies within the free block `around`. Splits the run if the
  // segment is in its middle.
  void RemoveSegment(Run& run, size_t index, BlockRecord* around);
  // Makes a used block free, and joins it with its free neighbours.
  void Free(FreeLists& lists, BlockRecord* block);

  // Makes a free block between two others. It is in no list yet.
  BlockRecord* NewBlock(char* data, uint64_t capacity_bytes, int numa_node, BlockRecord* before,
                        BlockRecord* after);
  // Removes a block from the ring of neighbours, and its record.
  void Unlink(BlockRecord* block);

  uint64_t segment_bytes_ = 0;
  uint64_t slab_bytes_ = 0;  // of all slabs
  BlockRecords records_;
  const uint64_t alignment_bytes_;
  const uint64_t bytes_per_slab_;
  std::vector<std::unique_ptr<Run>> runs_;
  std::vector<std::unique_ptr<Run>> slabs_;
  Part small_;
  Part large_;
};

// --- What every allocation and release does, in line ---

inline BlockRecord* SegmentHeap::NewBlock(char* data, uint64_t capacity_bytes, int numa_node,
                                          BlockRecord* before, BlockRecord* after) {
  BlockRecord* const block = records_.Take();
  block->data = data;
  block->capacity_bytes = capacity_bytes;
  block->numa_node = static_cast<int16_t>(numa_node);
  block->state = BlockState::kFree;
  Connect(*before, *block);
  Connect(*block, *after);
  return block;
}

inline void SegmentHeap::Unlink(BlockRecord* block) {
  Connect(*block->before, *block->after);
  records_.Put(block);
}

ABSL_ATTRIBUTE_ALWAYS_INLINE inline BlockRecord* SegmentHeap::Carve(FreeLists& lists,
                                                                    BlockRecord* free,
                                                                    uint64_t bytes) {
  const uint64_t rest_bytes = free->capacity_bytes - bytes;
  if (rest_bytes == 0) {
    lists.Remove(free);
    return free;
  }
  BlockRecord* const taken = NewBlock(free->data, bytes, free->numa_node, free->before, free);
  free->data += bytes;
  lists.Resize(free, rest_bytes);
  return taken;
}

ABSL_ATTRIBUTE_ALWAYS_INLINE inline void SegmentHeap::Free(FreeLists& lists, BlockRecord* block) {
  BlockRecord* const before = block->before;
  BlockRecord* const after = block->after;
  uint64_t bytes = block->capacity_bytes;
  if (before->state == BlockState::kFree) {
    if (after->state == BlockState::kFree) {
      bytes += after->capacity_bytes;
      lists.Remove(after);
      Unlink(after);
    }
    Unlink(block);
    lists.Resize(before, before->capacity_bytes + bytes);
  } else if (after->state == BlockState::kFree) {
    after->data = block->data;
    Unlink(block);
    lists.Resize(after, after->capacity_bytes + bytes);
  } else {
    block->state = BlockState::kFree;
    lists.Insert(block);
  }
}

ABSL_ATTRIBUTE_ALWAYS_INLINE inline BlockRecord* SegmentHeap::Take(uint64_t class_bytes) {
  Part& part = PartOf(class_bytes);
  BlockRecord* block = part.free.Find(class_bytes);
  if (block == nullptr) [[unlikely]] {
    block = FindAfterAll(class_bytes);
    if (block == nullptr) return nullptr;
  }
  block = Carve(part.free, block, class_bytes);
  part.used_bytes += class_bytes;
  block->state = BlockState::kLive;
  return block;
}

ABSL_ATTRIBUTE_ALWAYS_INLINE inline void SegmentHeap::Put(BlockRecord* block) {
  Part& part = PartOf(block->capacity_bytes);
  part.used_bytes -= block->capacity_bytes;
  Free(part.free, block);
}

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_HEAP_SEGMENT_HEAP_H_
