#include "pinion/allocator/pool/segment_pool.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/container/inlined_vector.h"
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

// Deferred blocks are looked at by every so many allocations: the counter that says which are done
// is in the cache of the thread that raises it.
constexpr uint32_t kReclaimEvery = 4;

// How many such looks go by until one looks into the buffers of all threads.
constexpr uint32_t kLookAroundEvery = 64;

// How many releases of other threads one allocation enters into the books: few, for its latency.
// Two keep pace, since a block that is released was allocated once.
constexpr uint32_t kSettlePerAllocation = 2;

}  // namespace

SegmentPool::SegmentPool(std::shared_ptr<HostMemorySource> source, const AllocatorOptions& options)
    : alignment_bytes_(options.alignment_bytes),
      segment_bytes_(options.segment_bytes),
      source_(std::move(source), options.max_locked_bytes),
      books_(options.alignment_bytes, options.segment_bytes) {}

SegmentPool::~SegmentPool() {
  const absl::Status waited = WaitForAllDeferred(kTeardownWait);
  GiveBack({});
  if (const uint64_t leaked = locked_bytes(); leaked != 0) {
    PINION_LOG(kError) << "leaking " << HumanBytes(leaked) << " of " << source_.name()
                       << " memory: " << waited.message();
  }
}

uint64_t SegmentPool::BookedBytes(uint64_t size_bytes) const {
  const uint64_t class_bytes = RoundUpToSizeClass(size_bytes + kRedZoneBytes);
  return IsSmallClass(class_bytes) ? class_bytes : AlignUp(class_bytes, alignment_bytes_);
}

uint64_t SegmentPool::LeastSegmentBytes(uint64_t size_bytes) const {
  return AlignUp(BookedBytes(size_bytes), source_.granularity_bytes());
}

BlockRecord* SegmentPool::TryAllocate(uint64_t size_bytes, PoolBooks::Way way) {
  const uint64_t class_bytes = BookedBytes(size_bytes);
  Leftovers leftovers;
  BlockRecord* block;
  {
    MutexLock lock(mu_);
    buffers_.TakeIncoming(&incoming_);
    const bool mine = buffers_.TakeMine(&incoming_);
    SettleLocked(mine ? incoming_.back()->size : kSettlePerAllocation, &leftovers);
    if (until_reclaim_-- == 0) ReclaimLocked(&leftovers);
    block = books_.Take(size_bytes, class_bytes, way);
    if (block == nullptr) {
      SettleAllLocked(&leftovers);
      ReclaimLocked(&leftovers);
      block = books_.Take(size_bytes, class_bytes, way);
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
  const ReleaseBatch::Release release = {block, id, open[0]->value};
  if (open.size() == 1) return ReleaseLater(release, open[0]->timeline);

  std::shared_ptr<SegmentPool> last;
  MutexLock lock(mu_);
  EnterLocked(release, open[0]->timeline, 0, &last);
  for (size_t i = 1; i < open.size(); ++i) books_.Defer(block, open[i]->timeline, open[i]->value);
}

void SegmentPool::MarkReleased(BlockRecord* block, uint64_t id) {
  MutexLock lock(mu_);
  books_.MarkReleased(block, id);
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
  books_.Enter(release, timeline, completed);
  if (books_.live_blocks() == 0) *last = std::move(kept_by_blocks_);
}

std::vector<FenceTicket> SegmentPool::ReclaimAndListTickets() {
  Leftovers leftovers;
  MutexLock lock(mu_);
  SettleAllLocked(&leftovers);
  ReclaimLocked(&leftovers);
  return books_.NextTickets();
}

bool SegmentPool::PollDeferred() {
  const std::vector<FenceTicket> tickets = ReclaimAndListTickets();
  for (const FenceTicket& ticket : tickets) ticket.timeline->Poll();
  return !tickets.empty();
}

BlockRecord* SegmentPool::TakeDeferred(uint64_t size_bytes, absl::Duration longest_wait) {
  const bool some_left = PollDeferred();
  BlockRecord* const block = TryAllocate(size_bytes, PoolBooks::Way::kPolled);
  if (block != nullptr || !some_left || longest_wait <= absl::ZeroDuration()) return block;
  {
    MutexLock lock(mu_);
    books_.CountWait();
  }
  return WaitForDeferred(size_bytes, longest_wait);
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
      BlockRecord* const block = TryAllocate(size_bytes, PoolBooks::Way::kWaited);
      if (block != nullptr) return block;
    }
    // Without a ticket, too: others may have reclaimed what it was open for.
    if (!waited) return TryAllocate(size_bytes, PoolBooks::Way::kWaited);
  }
}

BlockRecord* SegmentPool::AddSegment(const HostSegment& segment, uint64_t size_bytes) {
  if (kHardened) PoisonFree(segment.data, segment.size_bytes);
  const auto joins_at = [this](const void* border) { return source_.JoinsAt(border); };
  BlockRecord* block;
  {
    MutexLock lock(mu_);
    block = books_.AddSegment(segment, joins_at, size_bytes, BookedBytes(size_bytes));
  }
  if (kHardened && block != nullptr) PrepareBlock(*block);
  return block;
}

LimitedSource::GivenBack SegmentPool::GiveBack(const SegmentHeap::Removal& wanted) {
  Leftovers leftovers;
  std::vector<HostSegment> segments;
  {
    MutexLock lock(mu_);
    SettleAllLocked(&leftovers);
    ReclaimLocked(&leftovers);
    segments = books_.RemoveFreeSegments(wanted);
  }
  return source_.Unpin(segments);
}

uint64_t SegmentPool::RoomForLargeBlocks() {
  Leftovers leftovers;
  MutexLock lock(mu_);
  SettleAllLocked(&leftovers);
  ReclaimLocked(&leftovers);
  return books_.RoomForLargeBlocks();
}

uint64_t SegmentPool::locked_bytes() const {
  MutexLock lock(mu_);
  return books_.segment_bytes();
}

AllocatorStats SegmentPool::GetStats() {
  AllocatorStats stats;
  {
    Leftovers leftovers;
    MutexLock lock(mu_);
    SettleAllLocked(&leftovers);
    stats = books_.Stats();
  }
  static_cast<SourceStats&>(stats) = source_.stats();
  return stats;
}

void SegmentPool::Abandon(std::shared_ptr<SegmentPool> pool) {
  if (pool->origin_.InForkedChild()) return KeepForEver(std::move(pool));
  {
    Leftovers leftovers;
    MutexLock lock(pool->mu_);
    pool->buffers_.Close(&pool->incoming_);
    pool->SettleLocked(UINT64_MAX, &leftovers);
    if (pool->books_.live_blocks() != 0) pool->kept_by_blocks_ = pool;
  }
  pool->GiveBack({});
}

void SegmentPool::ReclaimLocked(Leftovers* leftovers) {
  until_reclaim_ = kReclaimEvery - 1;
  if (until_look_around_-- == 0) {
    // A thread that has ended leaves its last releases, and what they hold on to, in its buffer.
    until_look_around_ = kLookAroundEvery;
    SettleAllLocked(leftovers);
  }
  books_.Reclaim(&leftovers->timelines);
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
