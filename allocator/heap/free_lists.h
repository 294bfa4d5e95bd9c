// Free blocks by size: two levels of buckets with a bitmap each, so that insertion, removal and
// search take constant time whatever the number of holes.
//
// Thread safety: none of its own.

#ifndef PINION_ALLOCATOR_HEAP_FREE_LISTS_H_
#define PINION_ALLOCATOR_HEAP_FREE_LISTS_H_

#include <array>
#include <cstdint>

#include "pinion/allocator/heap/segment.h"
#include "pinion/allocator/heap/size_class.h"

namespace pinion::internal {

class FreeLists {
 public:
  void Insert(BlockRecord* block);
  void Remove(BlockRecord* block);

  // As Remove, a change of the block's capacity, and Insert; a block that stays in its bucket, as
  // the rest of a large one mostly does, keeps its place.
  void Resize(BlockRecord* block, uint64_t capacity_bytes);

  // A block of at least `size_bytes`, at most the class of the largest request, that is as small as
  // the buckets can tell; null if there is none. It stays in its list.
  BlockRecord* Find(uint64_t size_bytes) const;

 private:
  // The first bucket that is not empty, from `bucket` on; -1 if there is none.
  int FirstUsedBucket(int bucket) const;

  std::array<BlockRecord*, kLevels* kBucketsPerLevel> heads_ = {};
  std::array<uint64_t, kLevels> used_buckets_ = {};
  uint64_t used_levels_ = 0;
};

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_HEAP_FREE_LISTS_H_
