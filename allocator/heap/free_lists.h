// Free blocks by size, in two levels of buckets with bitmaps. Insertion, removal and search take
// constant time.
//
// The block that grew or shrank last is "in hand", and in no bucket. So to cut from a large block
// and to join the piece again moves no block between buckets.
//
// Thread safety: none of its own.

#ifndef PINION_ALLOCATOR_HEAP_FREE_LISTS_H_
#define PINION_ALLOCATOR_HEAP_FREE_LISTS_H_

#include <array>
#include <bit>
#include <cstdint>
#include <vector>

#include "absl/base/attributes.h"
#include "pinion/allocator/heap/block_records.h"
#include "pinion/allocator/heap/size_class.h"

namespace pinion::internal {

class FreeLists {
 public:
  FreeLists() {
    none_.capacity_bytes = UINT64_MAX;
    heads_[kLevels][0] = &none_;
    used_buckets_[kLevels] = 1;
    used_levels_ = uint64_t{1} << kLevels;
  }
  FreeLists(const FreeLists&) = delete;
  FreeLists& operator=(const FreeLists&) = delete;

  void Insert(BlockRecord* block);

  void Remove(BlockRecord* block) {
    if (block == in_hand_) {
      in_hand_ = &none_;
    } else {
      RemoveFromBucket(block);
    }
  }

  // Like Remove, a change of the block's capacity, and Insert.
  void Resize(BlockRecord* block, uint64_t capacity_bytes) {
    if (block != in_hand_) TakeInHand(block, capacity_bytes);
    block->capacity_bytes = capacity_bytes;
  }

  // Returns a free block of at least `size_bytes`, the smallest one that the buckets can tell. Null
  // if there is none. `size_bytes` is at most the largest class. The block is not removed.
  BlockRecord* Find(uint64_t size_bytes) const;

  // Returns all blocks of at least `size_bytes`, unordered. kMinBlockBytes returns all blocks.
  std::vector<BlockRecord*> AtLeast(uint64_t size_bytes) const;

 private:
  void RemoveFromBucket(BlockRecord* block);
  // Does nothing if the block's bucket does not change with its capacity.
  void TakeInHand(BlockRecord* block, uint64_t capacity_bytes);
  // Returns a block of the first used bucket from `bucket` on, or none_.
  BlockRecord* FirstFrom(BucketIndex bucket) const;
  // The same for a size that is no bucket's lower bound.
  BlockRecord* FirstInside(uint64_t size_bytes) const;

  BlockRecord* in_hand_ = &none_;
  uint64_t used_levels_;
  std::array<uint64_t, kLevels + 1> used_buckets_ = {};
  std::array<std::array<BlockRecord*, kBucketsPerLevel>, kLevels + 1> heads_ = {};
  BlockRecord none_;  // larger than all blocks, in a level of its own
};

// Chooses without a branch, which processors would often mispredict.
ABSL_ATTRIBUTE_ALWAYS_INLINE inline BlockRecord* FreeLists::Find(uint64_t size_bytes) const {
  const BucketIndex bucket = BucketOf(size_bytes);
  BlockRecord* found = FirstFrom(bucket);
  if (LowerBoundOf(bucket) != size_bytes) [[unlikely]]
    found = FirstInside(size_bytes);
  // A block that does not fit wraps around to a huge rest.
  const bool in_hand = in_hand_->capacity_bytes - size_bytes <= found->capacity_bytes - size_bytes;
  BlockRecord* const tightest = in_hand ? in_hand_ : found;
  return tightest == &none_ ? nullptr : tightest;
}

ABSL_ATTRIBUTE_ALWAYS_INLINE inline BlockRecord* FreeLists::FirstFrom(BucketIndex bucket) const {
  int level = bucket.level;
  uint64_t buckets = used_buckets_[level] & (~uint64_t{0} << bucket.within);
  if (buckets == 0) {
    level = std::countr_zero(used_levels_ & (~uint64_t{1} << level));
    buckets = used_buckets_[level];
  }
  return heads_[level][std::countr_zero(buckets)];
}

inline void FreeLists::Insert(BlockRecord* block) {
  const BucketIndex bucket = BucketOf(block->capacity_bytes);
  BlockRecord*& head = heads_[bucket.level][bucket.within];
  block->previous_free = nullptr;
  block->next_free = head;
  if (head != nullptr) head->previous_free = block;
  head = block;
  used_buckets_[bucket.level] |= uint64_t{1} << bucket.within;
  used_levels_ |= uint64_t{1} << bucket.level;
}

inline void FreeLists::RemoveFromBucket(BlockRecord* block) {
  if (block->next_free != nullptr) block->next_free->previous_free = block->previous_free;
  if (block->previous_free != nullptr) {
    block->previous_free->next_free = block->next_free;
    return;
  }
  const BucketIndex bucket = BucketOf(block->capacity_bytes);
  heads_[bucket.level][bucket.within] = block->next_free;
  if (block->next_free != nullptr) return;
  used_buckets_[bucket.level] &= ~(uint64_t{1} << bucket.within);
  if (used_buckets_[bucket.level] == 0) used_levels_ &= ~(uint64_t{1} << bucket.level);
}

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_HEAP_FREE_LISTS_H_
