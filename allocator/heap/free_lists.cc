#include "pinion/allocator/heap/free_lists.h"

namespace pinion::internal {
namespace {

// A class above 256 MiB may lie within a bucket, so blocks of that bucket are probed too. A host
// has few blocks of such sizes.
constexpr int kMaxProbes = 16;

}  // namespace

void FreeLists::TakeInHand(BlockRecord* block, uint64_t capacity_bytes) {
  if (BucketOf(capacity_bytes) == BucketOf(block->capacity_bytes)) return;
  RemoveFromBucket(block);
  if (in_hand_ != &none_) Insert(in_hand_);
  in_hand_ = block;
}

BlockRecord* FreeLists::FirstInside(uint64_t size_bytes) const {
  const BucketIndex bucket = BucketOf(size_bytes);
  BlockRecord* block = heads_[bucket.level][bucket.within];
  for (int probe = 0; block != nullptr && probe < kMaxProbes; ++probe) {
    if (block->capacity_bytes >= size_bytes) return block;
    block = block->next_free;
  }
  const bool last = bucket.within == kBucketsPerLevel - 1;
  return FirstFrom(last ? BucketIndex{bucket.level + 1, 0}
                        : BucketIndex{bucket.level, bucket.within + 1});
}

std::vector<BlockRecord*> FreeLists::AtLeast(uint64_t size_bytes) const {
  std::vector<BlockRecord*> found;
  const auto add = [&](BlockRecord* block) {
    if (block != &none_ && block->capacity_bytes >= size_bytes) found.push_back(block);
  };
  add(in_hand_);
  const BucketIndex first = BucketOf(size_bytes);
  for (int level = first.level; level < kLevels; ++level) {
    uint64_t buckets = used_buckets_[level];
    if (level == first.level) buckets &= ~uint64_t{0} << first.within;
    for (; buckets != 0; buckets &= buckets - 1) {
      BlockRecord* block = heads_[level][std::countr_zero(buckets)];
      for (; block != nullptr; block = block->next_free) add(block);
    }
  }
  return found;
}

}  // namespace pinion::internal
