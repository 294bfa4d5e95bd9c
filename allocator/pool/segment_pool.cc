#include "pinion/allocator/pool/segment_pool.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/deadline.h"
#include "pinion/allocator/base/keep_for_ever.h"
#include "pinion/allocator/heap/hardening.h"
#include "pinion/allocator/heap/size_class.h"

namespace pinion::internal {
namespace {

constexpr absl::Duration kTeardownWait = absl::Seconds(1);
// The least that one timeline is waited for while others are deferred too.
constexpr absl::Duration kShortestWait = absl::Microseconds(100);

// Pools take ids by the chunk, so that a block costs no atomic operation that pools share.
constexpr uint64_t kIdsPerChunk = 4096;
std::atomic<uint64_t> next_chunk_of_ids{1};

void Add(ByteGauge* gauge, uint64_t bytes) {
  gauge->current += bytes;
  gauge->total += bytes;
  gauge->peak = std::max(gauge->peak, gauge->current);
}

// Deferred blocks are looked at by every so many allocations: the counter that says which are done
// is in the cache of the thread that raises it.
constexpr uint32_t kReclaimEvery = 4;

// How many such looks go by until one looks into the buffers of all threads.
constexpr uint32_t kLookAroundEvery = 64;

// How many releases of other threads one allocation enters into the books: few, for its latency.
// Two keep pace, since a block that is released was allocated once.
constexpr uint32_t kSettlePerAllocation = 2;

// Hardened builds mark a block as released at once; others find a second release when they enter
// it.
constexpr BlockState kStateOnEntry = kHardened ? BlockState::kReleased : BlockState::kLive;

// A slab is a sixty-fourth of a segment, within these bounds.
constexpr uint64_t kLeastSlabBytes = 64 * kKiB;
constexpr uint64_t kMostSlabBytes = 2 * kMiB;

uint64_t SlabBytes(uint64_t segment_bytes) {
  return std::clamp(segment_bytes / 64, kLeastSlabBytes, kMostSlabBytes);
}

}  // namespace

SegmentPool::SegmentPool(std::shared_ptr<HostMemorySource> source, bool pinned,
                         const AllocatorOptions& options)
    : source_(std::move(source)),
      pinned_(pinned),
      max_locked_bytes_(options.max_locked_bytes),
      alignment_bytes_(options.alignment_bytes),
      segment_bytes_(options.segment_bytes),
      heap_(options.alignment_bytes, SlabBytes(options.segment_bytes)) {}

SegmentPool::~SegmentPool() {
  const absl::Status waited = WaitForAllDeferred(kTeardownWait);
  GiveBack({});
  if (const uint64_t leaked = locked_bytes(); leaked != 0) {
    PINION_LOG(kError) << "leaking " << HumanBytes(leaked) << " of " << source_->name()
                       << " memory: " << waited.message();
  }
}

uint64_t SegmentPool::BookedBytes(uint64_t size_bytes) const {
  const uint64_t class_bytes = RoundUpToSizeClass(size_bytes + kRedZoneBytes);
  return IsSmallClass(class_bytes) ? class_bytes : AlignUp(class_bytes, alignment_bytes_);
}

uint64_t SegmentPool::LeastSegmentBytes(uint64_t size_bytes) const {
  return AlignUp(BookedBytes(size_bytes), source_->granularity_bytes());
}

BlockRecord* SegmentPool::TryAllocate(uint64_t size_bytes) {
  Leftovers leftovers;
  BlockRecord* block;
  {
    MutexLock lock(mu_);
    buffers_.TakeIncoming(&incoming_);
    const bool mine = buffers_.TakeMine(&incoming_);
    SettleLocked(mine ? incoming_.back()->size : kSettlePerAllocation, &leftovers);
    if (until_reclaim_-- == 0) ReclaimLocked(&leftovers);
    block = TakeLocked(size_bytes, /*hit=*/true);
    if (block == nullptr) {
      SettleAllLocked(&leftovers);
      ReclaimLocked(&leftovers);
      block = TakeLocked(size_bytes, /*hit=*/true);
    }
  }
  if (kHardened && block != nullptr) PrepareBlock(*block);
  return block;
}

void SegmentPool::Release(BlockRecord* block, uint64_t id) {
  if (origin_.InForkedChild()) return;
  if (kHardened) {
    MarkReleased(block, id);
    CheckAndPoisonBlock(*block);
  }
  if (!mu_.TryLock()) return ReleaseLater({block, id}, nullptr);
  std::shared_ptr<SegmentPool> last;
  EnterLocked({block, id}, nullptr, 0, &last);
  mu_.Unlock();
}

void SegmentPool::ReleaseAfter(BlockRecord* block, uint64_t id,
                               absl::Span<const FenceTicket> tickets) {
  if (origin_.InForkedChild()) return;
  absl::InlinedVector<const FenceTicket*, 2> open;
  for (const FenceTicket& ticket : tickets) {
    if (!ticket.IsDone()) open.push_back(&ticket);
  }
  if (open.empty()) return Release(block, id);
  if (kHardened) MarkReleased(block, id);
  if (open.size() == 1) return ReleaseLater({block, id, open[0]->value}, open[0]->timeline);

  std::shared_ptr<SegmentPool> last;
  MutexLock lock(mu_);
  EndLifeLocked(block, id, &last);
  for (const FenceTicket* ticket : open) DeferLocked(block, ticket->timeline, ticket->value);
}

void SegmentPool::MarkReleased(BlockRecord* block, uint64_t id) {
  MutexLock lock(mu_);
  CheckReleased(*block, id, BlockState::kLive, &heap_);
  block->state = BlockState::kReleased;
}

void SegmentPool::ReleaseLater(const ReleaseBatch::Release& release,
                               const std::shared_ptr<FenceTimeline>& timeline) {
  if (buffers_.Add(release, timeline)) return;
  std::shared_ptr<SegmentPool> last;
  MutexLock lock(mu_);
  EnterLocked(release, timeline, 0, &last);
}

void SegmentPool::SettleAllLocked(Leftovers* leftovers) {
  buffers_.TakeAll(&incoming_);
  SettleLocked(UINT64_MAX, leftovers);
}

void SegmentPool::SettleLocked(uint64_t most, Leftovers* leftovers) {
  while (!incoming_.empty() && most-- > 0) {
    ReleaseBatch& batch = *incoming_.back();
    EnterLocked(batch.releases[--batch.size], batch.timeline, batch.completed, &leftovers->last);
    if (batch.size > 0) continue;
    leftovers->timelines.push_back(std::move(batch.timeline));
    buffers_.Recycle(std::move(incoming_.back()));
    incoming_.pop_back();
  }
}

void SegmentPool::EnterLocked(const ReleaseBatch::Release& release,
                              const std::shared_ptr<FenceTimeline>& timeline, uint64_t completed,
                              std::shared_ptr<SegmentPool>* last) {
  EndLifeLocked(release.block, release.id, last);
  if (release.ticket > completed) return DeferLocked(release.block, timeline, release.ticket);
  if (kHardened && release.ticket != 0) CheckAndPoisonBlock(*release.block);
  PutLocked(release.block);
}

void SegmentPool::DeferLocked(BlockRecord* block, const std::shared_ptr<FenceTimeline>& timeline,
                              uint64_t value) {
  if (block->state != BlockState::kDeferred) Add(&stats_.deferred_bytes, block->capacity_bytes);
  block->state = BlockState::kDeferred;
  deferred_.Add(block, timeline, value);
}

std::vector<FenceTicket> SegmentPool::ReclaimAndListTickets() {
  Leftovers leftovers;
  MutexLock lock(mu_);
  SettleAllLocked(&leftovers);
  ReclaimLocked(&leftovers);
  return deferred_.NextTickets();
}

bool SegmentPool::PollDeferred() {
  const std::vector<FenceTicket> tickets = ReclaimAndListTickets();
  for (const FenceTicket& ticket : tickets) ticket.timeline->Poll();
  return !tickets.empty();
}

BlockRecord* SegmentPool::WaitForDeferred(uint64_t size_bytes, absl::Duration timeout) {
  const Deadline deadline(timeout);
  while (true) {
    const std::vector<FenceTicket> tickets = ReclaimAndListTickets();
    bool waited = false;
    for (const FenceTicket& ticket : tickets) {
      const absl::Duration left = deadline.Left();
      if (left == absl::ZeroDuration()) return nullptr;
      // A timeline that is stuck must not use up the others' time.
      const absl::Duration share =
          std::max(kShortestWait, left / static_cast<int64_t>(tickets.size()));
      const absl::Status status = ticket.timeline->Wait(ticket.value, std::min(left, share));
      waited |= status.ok() || absl::IsDeadlineExceeded(status);
      if (BlockRecord* block = TryAllocate(size_bytes); block != nullptr) return block;
    }
    // Without a ticket, too: others may have reclaimed what it was open for.
    if (!waited) return TryAllocate(size_bytes);
  }
}

absl::Status SegmentPool::BeginGrowth(uint64_t bytes) {
  MutexLock lock(mu_);
  const uint64_t taken = heap_.segment_bytes() + in_transit_bytes_;
  if (bytes > max_locked_bytes_ - taken) {
    return absl::ResourceExhaustedError(absl::StrCat("to lock ", HumanBytes(bytes),
                                                     " more would exceed max_locked_bytes, ",
                                                     HumanBytes(max_locked_bytes_)));
  }
  in_transit_bytes_ += bytes;
  return absl::OkStatus();
}

void SegmentPool::CancelGrowth(uint64_t bytes) {
  MutexLock lock(mu_);
  in_transit_bytes_ -= bytes;
}

BlockRecord* SegmentPool::FinishGrowth(const HostSegment& segment, uint64_t size_bytes) {
  if (kHardened) PoisonFree(segment.data, segment.size_bytes);
  BlockRecord* block = nullptr;
  {
    MutexLock lock(mu_);
    in_transit_bytes_ -= segment.size_bytes;
    heap_.AddSegment(segment, [this](const void* border) { return source_->JoinsAt(border); });
    Add(&stats_.locked_bytes, segment.size_bytes);
    if (size_bytes != 0) block = TakeLocked(size_bytes, /*hit=*/false);
    UpdateCachedLocked();
  }
  if (kHardened && block != nullptr) PrepareBlock(*block);
  return block;
}

uint64_t SegmentPool::BytesToLimit() const {
  MutexLock lock(mu_);
  return max_locked_bytes_ - heap_.segment_bytes() - in_transit_bytes_;
}

SegmentPool::GivenBack SegmentPool::GiveBack(const SegmentHeap::Removal& wanted) {
  Leftovers leftovers;
  std::vector<HostSegment> segments;
  uint64_t removed_bytes = 0;
  {
    MutexLock lock(mu_);
    SettleAllLocked(&leftovers);
    ReclaimLocked(&leftovers);
    segments = heap_.RemoveFreeSegments(wanted);
    for (const HostSegment& segment : segments) removed_bytes += segment.size_bytes;
    in_transit_bytes_ += removed_bytes;
    stats_.locked_bytes.current -= removed_bytes;
    if (!segments.empty()) ++stats_.trims;
    UpdateCachedLocked();
  }
  GivenBack result;
  uint64_t lost_bytes = 0;
  double unpin_ms = 0;
  double max_unpin_ms = 0;
  for (const HostSegment& segment : segments) {
    if (kHardened) CheckFreeSegment(segment);
    const Stopwatch stopwatch;
    const absl::Status status = source_->Free(segment);
    const double ms = absl::ToDoubleMilliseconds(stopwatch.Elapsed());
    unpin_ms += ms;
    max_unpin_ms = std::max(max_unpin_ms, ms);
    if (status.ok()) continue;
    PINION_LOG(kError) << source_->name() << " failed to free " << HumanBytes(segment.size_bytes)
                       << ", which are lost: " << status.ToString();
    lost_bytes += segment.size_bytes;
    result.status.Update(status);
  }
  result.bytes = removed_bytes - lost_bytes;
  {
    MutexLock lock(mu_);
    in_transit_bytes_ -= result.bytes;  // what is lost may still be pinned: the limit counts it
    stats_.unpin_calls += segments.size();
    stats_.unpin_ms += unpin_ms;
    stats_.max_unpin_ms = std::max(stats_.max_unpin_ms, max_unpin_ms);
    stats_.leaked_bytes += lost_bytes;
  }
  return result;
}

uint64_t SegmentPool::RoomForLargeBlocks() {
  Leftovers leftovers;
  MutexLock lock(mu_);
  SettleAllLocked(&leftovers);
  ReclaimLocked(&leftovers);
  heap_.DissolveFreeSlabs();
  return heap_.large_free_bytes();
}

uint64_t SegmentPool::locked_bytes() const {
  MutexLock lock(mu_);
  return heap_.segment_bytes();
}

AllocatorStats SegmentPool::GetStats() {
  Leftovers leftovers;
  MutexLock lock(mu_);
  SettleAllLocked(&leftovers);
  AllocatorStats stats = stats_;
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

void SegmentPool::CountPinCall(bool ok, absl::Duration duration) {
  const double ms = absl::ToDoubleMilliseconds(duration);
  MutexLock lock(mu_);
  ++stats_.pin_calls;
  if (!ok) ++stats_.pin_failures;
  stats_.pin_ms += ms;
  stats_.max_pin_ms = std::max(stats_.max_pin_ms, ms);
}

void SegmentPool::Count(uint64_t AllocatorStats::*counter) {
  MutexLock lock(mu_);
  ++(stats_.*counter);
}

void SegmentPool::Abandon(std::shared_ptr<SegmentPool> pool) {
  if (pool->origin_.InForkedChild()) return KeepForEver(std::move(pool));
  {
    Leftovers leftovers;
    MutexLock lock(pool->mu_);
    pool->buffers_.Close(&pool->incoming_);
    pool->SettleLocked(UINT64_MAX, &leftovers);
    if (pool->live_blocks_ != 0) pool->kept_by_blocks_ = pool;
  }
  pool->GiveBack({});
}

BlockRecord* SegmentPool::TakeLocked(uint64_t size_bytes, bool hit) {
  BlockRecord* block = heap_.Take(BookedBytes(size_bytes));
  if (block == nullptr) return nullptr;
  if (next_id_ == end_of_ids_) {
    next_id_ = next_chunk_of_ids.fetch_add(kIdsPerChunk, std::memory_order_relaxed);
    end_of_ids_ = next_id_ + kIdsPerChunk;
  }
  block->id = next_id_++;
  block->size_bytes = size_bytes;
  ++live_blocks_;
  ++stats_.allocations;
  ++(hit ? stats_.hits : stats_.misses);
  Add(&stats_.requested_bytes, size_bytes);
  Add(&stats_.booked_bytes, block->capacity_bytes);
  Add(&stats_.used_bytes, block->capacity_bytes);
  Bucket& bucket = BucketLocked(block);
  ++bucket.allocations;
  if (!hit) ++bucket.misses;
  Add(&bucket.booked_bytes, block->capacity_bytes);
  UpdateCachedLocked();
  return block;
}

void SegmentPool::PutLocked(BlockRecord* block) {
  stats_.used_bytes.current -= block->capacity_bytes;
  heap_.Put(block);
  UpdateCachedLocked();
}

void SegmentPool::ReclaimLocked(Leftovers* leftovers) {
  until_reclaim_ = kReclaimEvery - 1;
  if (until_look_around_-- == 0) {
    // A thread that has ended leaves its last releases, and what they hold on to, in its buffer.
    until_look_around_ = kLookAroundEvery;
    SettleAllLocked(leftovers);
  }
  done_.clear();
  deferred_.TakeDone(&done_, &leftovers->timelines);
  for (BlockRecord* block : done_) {
    if (kHardened) CheckAndPoisonBlock(*block);
    stats_.deferred_bytes.current -= block->capacity_bytes;
    PutLocked(block);
  }
}

void SegmentPool::EndLifeLocked(BlockRecord* block, uint64_t id,
                                std::shared_ptr<SegmentPool>* last) {
  CheckReleased(*block, id, kStateOnEntry, &heap_);
  stats_.requested_bytes.current -= block->size_bytes;
  stats_.booked_bytes.current -= block->capacity_bytes;
  BucketLocked(block).booked_bytes.current -= block->capacity_bytes;
  if (--live_blocks_ == 0) *last = std::move(kept_by_blocks_);
}

SegmentPool::Bucket& SegmentPool::BucketLocked(const BlockRecord* block) {
  return buckets_[FloorLog2(block->capacity_bytes) - kMinBlockLog2];
}

void SegmentPool::UpdateCachedLocked() {
  const uint64_t cached = heap_.segment_bytes() - stats_.used_bytes.current;
  ByteGauge& gauge = stats_.cached_bytes;
  gauge.total += cached - std::min(cached, gauge.current);
  gauge.current = cached;
  gauge.peak = std::max(gauge.peak, cached);
}

absl::Status SegmentPool::WaitForAllDeferred(absl::Duration timeout) {
  const Deadline deadline(timeout);
  while (true) {
    bool progress = false;
    absl::Status failed;
    for (const FenceTicket& ticket : ReclaimAndListTickets()) {
      const absl::Status waited = ticket.timeline->Wait(ticket.value, deadline.Left());
      progress |= waited.ok();
      failed.Update(waited);
    }
    if (!progress) return failed;
  }
}

}  // namespace pinion::internal
