#include "pinion/allocator/heap/free_lists.h"

#include <bit>

namespace pinion::internal {
namespace {

// Classes above 256 MiB lie inside of buckets, so a block that fits exactly may sit in the bucket
// below the first one that is sure to fit. There are few blocks of that size on any host.
constexpr int kMaxProbes = 16;

}  // namespace

void FreeLists::Insert(BlockRecord* block) {
  const int bucket = BucketOf(block->capacity_bytes);
  BlockRecord*& head = heads_[bucket];
  block->previous_free = nullptr;
  block->next_free = head;
  if (head != nullptr) head->previous_free = block;
  head = block;
  used_buckets_[bucket / kBucketsPerLevel] |= uint64_t{1} << (bucket % kBucketsPerLevel);
  used_levels_ |= uint64_t{1} << (bucket / kBucketsPerLevel);
}

void FreeLists::Remove(BlockRecord* block) {
  if (block->next_free != nullptr) block->next_free->previous_free = block->previous_free;
  if (block->previous_free != nullptr) {
    block->previous_free->next_free = block->next_free;
    return;
  }
  const int bucket = BucketOf(block->capacity_bytes);
  heads_[bucket] = block->next_free;
  if (block->next_free != nullptr) return;
  const int level = bucket / kBucketsPerLevel;
  used_buckets_[level] &= ~(uint64_t{1} << (bucket % kBucketsPerLevel));
  if (used_buckets_[level] == 0) used_levels_ &= ~(uint64_t{1} << level);
}

void FreeLists::Resize(BlockRecord* block, uint64_t capacity_bytes) {
  if (BucketOf(capacity_bytes) == BucketOf(block->capacity_bytes)) {
    block->capacity_bytes = capacity_bytes;
    return;
  }
  Remove(block);
  block->capacity_bytes = capacity_bytes;
  Insert(block);
}

BlockRecord* FreeLists::Find(uint64_t size_bytes) const {
  const int fitting = FirstFittingBucket(size_bytes);
  const int own = BucketOf(size_bytes);
  if (own != fitting) {
    BlockRecord* block = heads_[own];
    for (int probe = 0; block != nullptr && probe < kMaxProbes; ++probe) {
      if (block->capacity_bytes >= size_bytes) return block;
      block = block->next_free;
    }
  }
  const int bucket = FirstUsedBucket(fitting);
  return bucket < 0 ? nullptr : heads_[bucket];
}

int FreeLists::FirstUsedBucket(int bucket) const {
  int level = bucket / kBucketsPerLevel;
  uint64_t buckets = used_buckets_[level] & (~uint64_t{0} << (bucket % kBucketsPerLevel));
  if (buckets == 0) {
    const uint64_t levels = used_levels_ & (~uint64_t{0} << level << 1);
    if (levels == 0) return -1;
    level = std::countr_zero(levels);
    buckets = used_buckets_[level];
  }
  return level * kBucketsPerLevel + std::countr_zero(buckets);
}

}  // namespace pinion::internal
