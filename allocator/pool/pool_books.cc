#include "pinion/allocator/pool/pool_books.h"

#include <algorithm>
#include <atomic>

#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/heap/hardening.h"

namespace pinion::internal {
namespace {

// Pools take ids by the chunk, so that a block costs no atomic operation that pools share.
constexpr uint64_t kIdsPerChunk = 4096;
std::atomic<uint64_t> next_chunk_of_ids{1};

// Hardened builds mark a block as released at once; others find a second release when they enter
// it.
constexpr BlockState kStateOnEntry = kHardened ? BlockState::kReleased : BlockState::kLive;

// A slab is a sixty-fourth of a segment, within these bounds.
constexpr uint64_t kLeastSlabBytes = 64 * kKiB;
constexpr uint64_t kMostSlabBytes = 2 * kMiB;

uint64_t SlabBytes(uint64_t segment_bytes) {
  return std::clamp(segment_bytes / 64, kLeastSlabBytes, kMostSlabBytes);
}

void Add(ByteGauge* gauge, uint64_t bytes) {
  gauge->current += bytes;
  gauge->total += bytes;
  gauge->peak = std::max(gauge->peak, gauge->current);
}

}  // namespace

PoolBooks::PoolBooks(uint64_t alignment_bytes, uint64_t segment_bytes, Arena* arena)
    : heap_(alignment_bytes, SlabBytes(segment_bytes), arena) {}

BlockRecord* PoolBooks::Take(uint64_t size_bytes, uint64_t class_bytes, Way way) {
  BlockRecord* block = heap_.Take(class_bytes);
  if (block == nullptr) return nullptr;
  if (next_id_ == end_of_ids_) {
    next_id_ = next_chunk_of_ids.fetch_add(kIdsPerChunk, std::memory_order_relaxed);
    end_of_ids_ = next_id_ + kIdsPerChunk;
  }
  block->id = next_id_++;
  block->size_bytes = size_bytes;
  ++live_blocks_;
  ++allocations_;
  Add(&requested_bytes_, size_bytes);
  Add(&booked_bytes_, class_bytes);
  peak_used_bytes_ = std::max(peak_used_bytes_, used_bytes());
  Bucket& bucket = BucketOf(*block);
  ++bucket.allocations;
  Add(&bucket.booked_bytes, class_bytes);
  switch (way) {
    case Way::kCached:
      break;
    case Way::kPolled:
      ++stats_.polled_hits;
      break;
    case Way::kWaited:
      ++stats_.waited_hits;
      break;
    case Way::kGrown:
      ++stats_.misses;
      ++bucket.misses;
      grown_bytes_ += class_bytes;
  }
  return block;
}

void PoolBooks::MarkReleased(BlockRecord* block, uint64_t id) {
  CheckReleased(*block, id, BlockState::kLive);
  block->state = BlockState::kReleased;
}

void PoolBooks::Enter(const ReleaseBatch::Release& release,
                      const std::shared_ptr<FenceTimeline>& timeline, uint64_t completed) {
  BlockRecord* const block = release.block;
  CheckReleased(*block, release.id, kStateOnEntry);
  requested_bytes_.current -= block->size_bytes;
  booked_bytes_.current -= block->capacity_bytes;
  BucketOf(*block).booked_bytes.current -= block->capacity_bytes;
  --live_blocks_;
  if (release.ticket > completed) return Defer(block, timeline, release.ticket);
  if (kHardened && release.ticket != 0) CheckAndPoisonBlock(*block);
  Put(block);
}

void PoolBooks::Defer(BlockRecord* block, const std::shared_ptr<FenceTimeline>& timeline,
                      uint64_t value) {
  if (block->state != BlockState::kDeferred) Add(&deferred_bytes_, block->capacity_bytes);
  block->state = BlockState::kDeferred;
  deferred_.Add(block, timeline, value);
}

void PoolBooks::Reclaim(DeferredReleases::Timelines* retired) {
  done_.clear();
  deferred_.TakeDone(&done_, retired);
  for (BlockRecord* block : done_) {
    if (kHardened) CheckAndPoisonBlock(*block);
    deferred_bytes_.current -= block->capacity_bytes;
    Put(block);
  }
}

BlockRecord* PoolBooks::AddSegments(absl::Span<const HostSegment> segments,
                                    SegmentHeap::JoinsAt joins_at, uint64_t size_bytes,
                                    uint64_t class_bytes, Way way) {
  for (const HostSegment& segment : segments) heap_.AddSegment(segment, joins_at);
  BlockRecord* const block = size_bytes == 0 ? nullptr : Take(size_bytes, class_bytes, way);
  peak_cached_bytes_ = std::max(peak_cached_bytes_, cached_bytes());
  return block;
}

uint64_t PoolBooks::RoomForLargeBlocks() {
  heap_.DissolveFreeSlabs();
  return heap_.large_free_bytes();
}

AllocatorStats PoolBooks::Stats() const {
  AllocatorStats stats = stats_;
  stats.allocations = allocations_;
  stats.hits = allocations_ - stats.misses;
  stats.requested_bytes = requested_bytes_;
  stats.booked_bytes = booked_bytes_;
  stats.deferred_bytes = deferred_bytes_;
  stats.used_bytes = {
      .current = used_bytes(), .peak = peak_used_bytes_, .total = booked_bytes_.total};
  const uint64_t put_bytes = booked_bytes_.total - used_bytes();
  stats.cached_bytes = {
      .current = cached_bytes(), .peak = peak_cached_bytes_, .total = put_bytes - grown_bytes_};
  for (const Bucket& bucket : buckets_) {
    if (bucket.allocations == 0) continue;
    stats.size_buckets.push_back({.from_bytes = kMinBlockBytes << (&bucket - buckets_.data()),
                                  .allocations = bucket.allocations,
                                  .misses = bucket.misses,
                                  .booked_bytes = bucket.booked_bytes});
  }
  stats.numa_nodes = heap_.NumaNodes();
  return stats;
}

PoolBooks::Bucket& PoolBooks::BucketOf(const BlockRecord& block) {
  return buckets_[FloorLog2(block.capacity_bytes) - kMinBlockLog2];
}

void PoolBooks::Put(BlockRecord* block) {
  heap_.Put(block);
  peak_cached_bytes_ = std::max(peak_cached_bytes_, cached_bytes());
}

}  // namespace pinion::internal
