#include "pinion/allocator/pool/arena.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <utility>

namespace pinion::internal {
namespace {

// Deferred blocks are looked at by every so many allocations: the counter that says which are done
// is in the cache of the thread that raises it.
constexpr uint32_t kReclaimEvery = 4;

// How many such looks go by until one looks into the buffers of all threads.
constexpr uint32_t kLookAroundEvery = 64;

// How many releases of other threads one allocation enters into the books: few, for its latency.
// Two keep pace, since a block that is released was allocated once.
constexpr int kSettlePerAllocation = 2;

// How many batches may wait for the tickets of the oldest. A timeline that is stuck then holds back
// its own blocks only.
constexpr size_t kMostWaitingBatches = 8;

}  // namespace

Arena::Arena(const SegmentPool* pool, const AllocatorOptions& options, bool has_owner)
    : pool_(pool),
      mu_(has_owner ? BiasedMutex::BestBarrier() : BiasedMutex::Barrier::kNobodyOwnsIt),
      books_(options.alignment_bytes, options.segment_bytes, this) {}

BlockRecord* Arena::TryAllocate(By by, const Request& request, Leftovers* leftovers) {
  BiasedLock lock(mu_, by);
  SettleSomeLocked(leftovers);
  if (until_reclaim_-- == 0) ReclaimLocked(leftovers);
  BlockRecord* block = books_.Take(request.size_bytes, request.class_bytes, request.way);
  if (block == nullptr) {
    SettleAllLocked(leftovers);
    ReclaimLocked(leftovers);
    block = books_.Take(request.size_bytes, request.class_bytes, request.way);
  }
  return block;
}

void Arena::MarkReleased(By by, BlockRecord* block, uint64_t id) {
  BiasedLock lock(mu_, by);
  books_.MarkReleased(block, id);
}

void Arena::Enter(By by, BlockRecord* block, uint64_t id, absl::Span<const FenceTicket* const> open,
                  Leftovers* leftovers) {
  BiasedLock lock(mu_, by);
  if (open.empty()) return EnterLocked({block, id}, nullptr, 0, leftovers);
  EnterLocked({block, id, open[0]->value}, open[0]->timeline, 0, leftovers);
  for (const FenceTicket* ticket : open.subspan(1)) {
    books_.Defer(block, ticket->timeline, ticket->value);
  }
}

std::vector<FenceTicket> Arena::ReclaimAndListTickets(By by, Leftovers* leftovers) {
  BiasedLock lock(mu_, by);
  SettleAllLocked(leftovers);
  ReclaimLocked(leftovers);
  return books_.NextTickets();
}

void Arena::CountWait(By by) {
  BiasedLock lock(mu_, by);
  books_.CountWait();
}

std::vector<HostSegment> Arena::GiveUp(By by, uint64_t least_bytes, double share,
                                       Leftovers* leftovers) {
  BiasedLock lock(mu_, by);
  SettleAllLocked(leftovers);
  ReclaimLocked(leftovers);
  const uint64_t free_bytes = books_.RoomForLargeBlocks();
  if (free_bytes < least_bytes) return {};
  const auto wanted_bytes = static_cast<uint64_t>(share * static_cast<double>(free_bytes));
  std::vector<HostSegment> pieces = books_.RemoveFreeSegments(std::max(least_bytes, wanted_bytes));
  // From the lowest on, each joins what is below it. To join what is above looks at all blocks
  // there.
  std::sort(pieces.begin(), pieces.end(), [](const HostSegment& a, const HostSegment& b) {
    return std::less<>()(a.data, b.data);
  });
  return pieces;
}

BlockRecord* Arena::TakeOver(By by, absl::Span<const HostSegment> pieces,
                             SegmentHeap::JoinsAt joins_at, const Request& request) {
  BiasedLock lock(mu_, by);
  return books_.AddSegments(pieces, joins_at, request.size_bytes, request.class_bytes, request.way);
}

uint64_t Arena::RoomForLargeBlocks(By by, Leftovers* leftovers) {
  BiasedLock lock(mu_, by);
  SettleAllLocked(leftovers);
  ReclaimLocked(leftovers);
  return books_.RoomForLargeBlocks();
}

AllocatorStats Arena::Stats(By by, Leftovers* leftovers) {
  BiasedLock lock(mu_, by);
  SettleAllLocked(leftovers);
  return books_.Stats();
}

uint64_t Arena::Close(By by, Leftovers* leftovers) {
  BiasedLock lock(mu_, by);
  buffers_.Close(&incoming_);
  SettleIncomingLocked(leftovers);
  closed_ = true;
  return books_.live_blocks();
}

void Arena::SettleSomeLocked(Leftovers* leftovers) {
  buffers_.TakeIncoming(&incoming_);
  if (buffers_.TakeMine(&incoming_)) {
    std::unique_ptr<ReleaseBatch> mine = std::move(incoming_.back());
    incoming_.pop_back();
    incoming_.push_front(std::move(mine));
    while (incoming_.front()->entered < incoming_.front()->size) {
      EnterNextLocked(*incoming_.front(), leftovers);
    }
    DropOldestLocked(leftovers);
  }
  for (int i = 0; i < kSettlePerAllocation && !incoming_.empty(); ++i) {
    ReleaseBatch& oldest = *incoming_.front();
    const bool done = oldest.releases[oldest.entered].ticket <= oldest.completed;
    if (!done && incoming_.size() <= kMostWaitingBatches) return;
    EnterNextLocked(oldest, leftovers);
    if (oldest.entered == oldest.size) DropOldestLocked(leftovers);
  }
}

void Arena::SettleIncomingLocked(Leftovers* leftovers) {
  while (!incoming_.empty()) {
    ReleaseBatch& oldest = *incoming_.front();
    while (oldest.entered < oldest.size) EnterNextLocked(oldest, leftovers);
    DropOldestLocked(leftovers);
  }
}

void Arena::SettleAllLocked(Leftovers* leftovers) {
  buffers_.TakeAll(&incoming_);
  SettleIncomingLocked(leftovers);
}

void Arena::EnterNextLocked(ReleaseBatch& batch, Leftovers* leftovers) {
  EnterLocked(batch.releases[batch.entered++], batch.timeline, batch.completed, leftovers);
}

void Arena::DropOldestLocked(Leftovers* leftovers) {
  std::unique_ptr<ReleaseBatch> oldest = std::move(incoming_.front());
  incoming_.pop_front();
  leftovers->timelines.push_back(std::move(oldest->timeline));
  oldest->size = 0;
  oldest->entered = 0;
  buffers_.Recycle(std::move(oldest));
}

void Arena::EnterLocked(const ReleaseBatch::Release& release,
                        const std::shared_ptr<FenceTimeline>& timeline, uint64_t completed,
                        Leftovers* leftovers) {
  books_.Enter(release, timeline, completed);
  if (closed_) ++leftovers->gone_blocks;
}

void Arena::ReclaimLocked(Leftovers* leftovers) {
  until_reclaim_ = kReclaimEvery - 1;
  if (until_look_around_-- == 0) {
    // A thread that has ended leaves its last releases, and what they hold on to, in its buffer.
    until_look_around_ = kLookAroundEvery;
    SettleAllLocked(leftovers);
  }
  books_.Reclaim(&leftovers->timelines);
  if (incoming_.empty() || incoming_.front()->timeline == nullptr) return;
  incoming_.front()->completed = incoming_.front()->timeline->Completed();
}

}  // namespace pinion::internal
