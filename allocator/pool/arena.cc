#include "pinion/allocator/pool/arena.h"

#include <cstddef>
#include <functional>
#include <utility>

namespace pinion::internal {
namespace {

// Releases of other threads that one allocation enters. Few, to bound its latency. More than one,
// because free blocks that are not entered yet cannot be reused or joined
// (docs/maintainers/decisions/0011).
constexpr int kSettlePerAllocation = 4;

// Batches that may wait behind the oldest one's tickets, until a miss or the next look around. They
// may belong to other timelines than a stuck one.
constexpr size_t kMostWaitingBatches = 8;

// Sorts by address, so that each piece joins the one below. Joining the one above would move
// everything in it.
std::vector<HostSegment> InOrder(std::vector<HostSegment> pieces) {
  std::sort(pieces.begin(), pieces.end(), [](const HostSegment& a, const HostSegment& b) {
    return std::less<>()(a.data, b.data);
  });
  return pieces;
}

}  // namespace

Arena::Arena(SegmentPool* pool, const AllocatorOptions& options, int thread_slot)
    : pool_(pool),
      owner_slot_(thread_slot),
      mu_(thread_slot == kNoThreadSlot ? BiasedMutex::Barrier::kNone : BiasedMutex::BestBarrier()),
      books_(options.alignment_bytes, options.segment_bytes, this) {}

BlockRecord* Arena::TryAllocate(By by, const Request& request, Leftovers* leftovers) {
  BiasedLock lock(mu_, by);
  left_.MakeNoneAtOnce();
  if (by == By::kOwner) mine_wait_ = false;
  SettleSomeLocked(leftovers);
  if (!incoming_.empty()) left_.ReclaimSoon();
  if (left_.IsReclaimDue()) {
    ReclaimLocked(leftovers);
  } else {
    left_.Count();
  }
  BlockRecord* block = books_.Take(request.size_bytes, request.class_bytes);
  if (block == nullptr) [[unlikely]] {
    SettleAllLocked(leftovers);
    ReclaimLocked(leftovers);
    block = books_.Take(request.size_bytes, request.class_bytes);
  }
  if (by == By::kOwner && (incoming_.empty() || OldestMayWaitLocked())) {
    left_.MakeAllAtOnce();
  }
  return block;
}

void Arena::MarkReleased(By by, BlockRecord* block, uint64_t id) {
  BiasedLock lock(mu_, by);
  books_.MarkReleased(block, id);
}

bool Arena::Enter(By by, BlockRecord* block, uint64_t id, absl::Span<const FenceTicket> tickets,
                  Leftovers* leftovers) {
  BiasedLock lock(mu_, by);
  const auto always_done = [](const FenceTicket& ticket) {
    return ticket.timeline == nullptr || ticket.value == 0;
  };
  for (const FenceTicket& ticket : tickets) {
    // Room for all tickets at once, because a timeline may occur several times.
    if (!always_done(ticket) && !books_.MakeRoomToDefer(ticket.timeline, tickets.size())) {
      return false;
    }
  }
  bool waits = false;
  for (const FenceTicket& ticket : tickets) {
    if (always_done(ticket)) continue;
    if (waits) {
      books_.Defer(block, ticket.timeline, ticket.value);
    } else {
      waits = EnterLocked({block, id, ticket.value}, ticket.timeline, 0, leftovers);
    }
  }
  return waits || EnterLocked({block, id, 0}, nullptr, 0, leftovers);
}

void Arena::Reclaim(By by, DeferredReleases::NextTickets* next, Leftovers* leftovers) {
  BiasedLock lock(mu_, by);
  SettleAllLocked(leftovers);
  ReclaimLocked(leftovers);
  books_.AddNextTickets(next);
}

std::vector<HostSegment> Arena::GiveUp(By by, Leftovers* leftovers) noexcept {
  BiasedLock lock(mu_, by);
  SettleAllLocked(leftovers);
  ReclaimLocked(leftovers);
  return InOrder(books_.RemoveFreeSegments(UINT64_MAX));
}

std::vector<HostSegment> Arena::GiveUpShare(By by, const Share& share,
                                            Leftovers* leftovers) noexcept {
  BiasedLock lock(mu_, by);
  SettleAllLocked(leftovers);
  ReclaimLocked(leftovers);
  const uint64_t free_bytes = books_.RoomForLargeBlocks();
  if (free_bytes < share.least_bytes) return {};
  const uint64_t wanted_bytes =
      std::max(share.least_bytes, std::min(share.most_bytes, free_bytes / 2));
  return InOrder(books_.RemoveFreeSegments(wanted_bytes, share.piece_bytes));
}

uint64_t Arena::MemoryBytes(By by) {
  BiasedLock lock(mu_, by);
  return books_.memory_bytes();
}

std::vector<HostSegment> Arena::FreeEnds(By by) {
  BiasedLock lock(mu_, by);
  return books_.FreeEnds();
}

std::vector<HostSegment> Arena::GiveUpFreeEnd(By by, const HostSegment& range) noexcept {
  BiasedLock lock(mu_, by);
  return books_.RemoveFreeEnd(range);
}

BlockRecord* Arena::TakeOver(By by, absl::Span<const HostSegment> pieces,
                             SegmentHeap::BorderAt border_at, const Request& request) noexcept {
  BiasedLock lock(mu_, by);
  return books_.AddSegments(pieces, border_at, request.size_bytes, request.class_bytes);
}

uint64_t Arena::RoomForLargeBlocks(By by, Leftovers* leftovers) {
  BiasedLock lock(mu_, by);
  SettleAllLocked(leftovers);
  ReclaimLocked(leftovers);
  return books_.RoomForLargeBlocks();
}

void Arena::AddStats(By by, AllocatorStats* sum, Leftovers* leftovers) {
  BiasedLock lock(mu_, by);
  SettleAllLocked(leftovers);
  books_.AddStats(sum);
}

uint64_t Arena::Close(By by, Leftovers* leftovers) {
  BiasedLock lock(mu_, by);
  buffers_.TakeAll(&incoming_, /*close=*/true);
  SettleIncomingLocked(leftovers);
  closed_ = true;
  return books_.live_blocks();
}

void Arena::SettleSomeLocked(Leftovers* leftovers) {
  buffers_.TakeIncoming(&incoming_);
  if (std::unique_ptr<ReleaseBatch> mine = buffers_.TakeMine(); mine != nullptr) {
    uint32_t left = mine->size;
    incoming_.push_front(std::move(mine));
    for (; left > 0; --left) {
      if (!EnterNextLocked(leftovers)) return;
    }
  }
  for (int left = kSettlePerAllocation; left > 0 && !incoming_.empty(); --left) {
    if (OldestMayWaitLocked()) return;
    incoming_.front().LookAgain();
    if (!EnterNextLocked(leftovers)) return;
  }
}

bool Arena::OldestMayWaitLocked() const {
  return incoming_.size() <= kMostWaitingBatches && incoming_.front().NextWaits();
}

void Arena::SettleIncomingLocked(Leftovers* leftovers) {
  BatchQueue kept;
  while (!incoming_.empty()) {
    incoming_.front().LookAgain();
    if (!EnterNextLocked(leftovers)) kept.push_back(incoming_.pop_front());
  }
  while (!kept.empty()) incoming_.push_back(kept.pop_front());
}

void Arena::SettleAllLocked(Leftovers* leftovers) {
  buffers_.TakeAll(&incoming_);
  SettleIncomingLocked(leftovers);
}

void Arena::LookAroundLocked(Leftovers* leftovers) {
  // A thread that has ended leaves its last releases in its buffer.
  buffers_.TakeAll(&incoming_);
  if (incoming_.empty()) return;
  // Other batches may wait behind the oldest one, whose timeline may be stuck.
  if (incoming_.front().seen_waiting) return SettleIncomingLocked(leftovers);
  incoming_.front().seen_waiting = true;
}

bool Arena::EnterNextLocked(Leftovers* leftovers) {
  ReleaseBatch& oldest = incoming_.front();
  const ReleaseBatch::Release& next = oldest.releases[oldest.entered];
  if (!EnterLocked(next, oldest.timeline, oldest.completed, leftovers)) return false;
  if (++oldest.entered == oldest.size) leftovers->batches.push_back(incoming_.pop_front());
  return true;
}

bool Arena::EnterLocked(const ReleaseBatch::Release& release,
                        const std::shared_ptr<FenceTimeline>& timeline, uint64_t completed,
                        Leftovers* leftovers) {
  if (!books_.Enter(release, timeline, completed)) return false;
  if (release.ticket > completed) left_.ReclaimSoon();
  if (closed_) ++leftovers->gone_blocks;
  return true;
}

void Arena::ReclaimLocked(Leftovers* leftovers) {
  if (left_.BeginReclaim()) {
    LookAroundLocked(leftovers);
    leftovers->look_at_all |= left_.OnLookAround();
  }
  books_.Reclaim(&leftovers->timelines);
  if (!incoming_.empty() && incoming_.front().timeline != nullptr) {
    incoming_.front().completed = incoming_.front().timeline->Completed();
  }
  left_.EndReclaim(/*some_wait=*/books_.some_deferred() || !incoming_.empty());
}

ArenaRound::ArenaRound(absl::Span<const std::atomic<Arena*>> arenas) {
  bool some_announced = false;
  for (const std::atomic<Arena*>& slot : arenas) {
    Arena* const arena = slot.load(std::memory_order_acquire);
    if (arena == nullptr) continue;
    Arena::By by = arena->RoleOfThisThread();
    if (by == Arena::By::kOther) {
      arena->Announce();
      by = Arena::By::kAnnounced;
      some_announced = true;
    }
    seats_.push_back({arena, by});
  }
  if (some_announced) BiasedMutex::RunBarrier();
}

ArenaRound::~ArenaRound() {
  for (const Seat& seat : seats_) {
    if (seat.by == Arena::By::kAnnounced) seat.arena->Renounce();
  }
}

std::vector<ArenaRound::Part> ArenaRound::FindHole(uint64_t least_bytes,
                                                   SegmentHeap::BorderAt border_at) const {
  std::vector<Part> parts;
  for (const Seat& seat : seats_) {
    for (const HostSegment& hole : seat.arena->FreeEnds(seat.by)) parts.push_back({hole, seat});
  }
  std::sort(parts.begin(), parts.end(),
            [](const Part& a, const Part& b) { return std::less<>()(a.hole.data, b.hole.data); });
  absl::Span<const Part> best;
  uint64_t best_bytes = UINT64_MAX;
  for (size_t first = 0, next; first < parts.size(); first = next) {
    const HostSegment& start = parts[first].hole;
    uint64_t bytes = start.size_bytes;
    for (next = first + 1; next < parts.size(); ++next) {
      const HostSegment& hole = parts[next].hole;
      const bool goes_on = static_cast<char*>(start.data) + bytes == hole.data &&
                           start.numa_node == hole.numa_node &&
                           border_at(hole.data) != SegmentHeap::Border::kCloses;
      if (!goes_on) break;
      bytes += hole.size_bytes;
    }
    if (bytes < least_bytes || bytes >= best_bytes) continue;
    best = absl::MakeConstSpan(parts).subspan(first, next - first);
    best_bytes = bytes;
  }
  return {best.begin(), best.end()};
}

}  // namespace pinion::internal
