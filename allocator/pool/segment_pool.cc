#include "pinion/allocator/pool/segment_pool.h"

#include <algorithm>
#include <cstddef>
#include <new>
#include <utility>

#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/deadline.h"
#include "pinion/allocator/base/keep_for_ever.h"

namespace pinion::internal {
namespace {

// A device that takes longer is stuck. Memory that it may still write to is leaked.
constexpr absl::Duration kWaitBeforeLeaking = absl::Seconds(1);
// Minimum wait for one timeline while blocks wait for others too.
constexpr absl::Duration kShortestWait = absl::Microseconds(100);

// How often a miss searches for a hole across arenas. An owner may fill a part first.
constexpr int kMostHoles = 8;

// More than the number of blocks. Keeps the count above zero while blocks are counted.
constexpr uint64_t kStillCounting = uint64_t{1} << 62;

}  // namespace

// Declare before taking the lock: its destructor must run after the unlock.
class SegmentPool::Aftermath : public Arena::Leftovers {
 public:
  explicit Aftermath(SegmentPool* pool) : pool_(pool) {}
  ~Aftermath() {
    if (gone_blocks != 0) pool_->CountDown(gone_blocks);
  }
  Aftermath(const Aftermath&) = delete;
  Aftermath& operator=(const Aftermath&) = delete;

 private:
  SegmentPool* const pool_;
};

SegmentPool::SegmentPool(std::shared_ptr<HostMemorySource> source, const AllocatorOptions& options)
    : options_(options),
      source_(std::move(source), options.max_locked_bytes),
      segments_(options.alignment_bytes) {}

SegmentPool::~SegmentPool() {
  const absl::Status waited = WaitForAllDeferred(kWaitBeforeLeaking);
  GiveBack({});
  if (const uint64_t leaked = locked_bytes(); leaked != 0) {
    PINION_LOG(kError) << "leaking " << HumanBytes(leaked) << " of " << source_.name()
                       << " memory: " << waited.message();
  }
}

uint64_t SegmentPool::LeastSegmentBytes(uint64_t size_bytes) const {
  return AlignUp(BookedBytes(size_bytes), source_.granularity_bytes());
}

Arena* SegmentPool::AddArena(int slot) {
  auto added = std::make_unique<Arena>(this, options_, slot);
  MutexLock lock(mu_);
  Arena* arena = arenas_[slot].load(std::memory_order_relaxed);
  if (arena != nullptr) return arena;  // another thread without a number was first
  arena = all_arenas_.emplace_back(std::move(added)).get();
  arenas_[slot].store(arena, std::memory_order_release);
  return arena;
}

SegmentPool::Seat SegmentPool::Mine() {
  const int slot = ThreadSlot();
  Arena* arena = arenas_[slot].load(std::memory_order_acquire);
  if (arena == nullptr) arena = AddArena(slot);
  return {arena, arena->RoleOfThisThread()};
}

BlockRecord* SegmentPool::TryAllocateThoroughly(uint64_t size_bytes) {
  const Arena::Request request = {size_bytes, BookedBytes(size_bytes)};
  const Seat mine = Mine();
  Aftermath aftermath(this);
  BlockRecord* block = mine.arena->TryAllocate(mine.by, request, &aftermath);
  if (block == nullptr) block = TakeFromOthers(mine, request, &aftermath);
  if (aftermath.look_at_all) {
    // Other arenas may belong to threads that have ended, and then nobody else reclaims their
    // blocks.
    try {
      Reclaim();
    } catch (const std::bad_alloc&) {  // another time: the block must not be lost
    }
  }
  if (kHardened && block != nullptr) PrepareBlock(*block);
  return block;
}

BlockRecord* SegmentPool::TakeFromOthers(const Seat& mine, const Arena::Request& request,
                                         Aftermath* aftermath) {
  MutexLock lock(mu_);
  // Memory that another thread had removed under this lock may be back.
  BlockRecord* block = mine.arena->TryAllocate(mine.by, request, aftermath);
  if (block != nullptr || all_arenas_.size() == 1) return block;
  const Arena::Share share = {.least_bytes = request.class_bytes,
                              .most_bytes = mine.arena->MemoryBytes(mine.by),
                              .piece_bytes = segments_.LeastPieceBytes()};
  const ArenaRound round(arenas_);
  for (const Seat& other : round.seats()) {
    if (other.arena == mine.arena) continue;
    const std::vector<HostSegment> pieces = other.arena->GiveUpShare(other.by, share, aftermath);
    if (pieces.empty()) continue;
    TakeOverLocked(mine, pieces, {});
    block = mine.arena->TryAllocate(mine.by, request, aftermath);
    if (block != nullptr) return block;
  }
  for (const Seat& other : round.seats()) {
    if (other.arena == mine.arena) continue;
    block = other.arena->TryAllocate(other.by, request, aftermath);
    if (block != nullptr) return block;
  }
  return TakeFromEnds(round, mine, request, aftermath);
}

BlockRecord* SegmentPool::TakeFromEnds(const ArenaRound& round, const Seat& mine,
                                       const Arena::Request& request, Aftermath* aftermath) {
  if (IsSmallClass(request.class_bytes)) return nullptr;  // any hole would have done
  const auto border_at = [this](const void* border) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return segments_.BorderAt(border, source_);
  };
  for (int holes = 0; holes < kMostHoles; ++holes) {
    const std::vector<ArenaRound::Part> hole = round.FindHole(request.class_bytes, border_at);
    if (hole.empty()) return nullptr;
    for (const ArenaRound::Part& part : hole) {
      if (part.seat.arena == mine.arena) continue;
      TakeOverLocked(mine, part.seat.arena->GiveUpFreeEnd(part.seat.by, part.hole), {});
    }
    BlockRecord* const block = mine.arena->TryAllocate(mine.by, request, aftermath);
    if (block != nullptr) return block;
  }
  return nullptr;
}

BlockRecord* SegmentPool::TakeOverLocked(const Seat& seat, absl::Span<const HostSegment> pieces,
                                         const Arena::Request& request) {
  const auto border_at = [this](const void* border) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return segments_.BorderAt(border, source_);
  };
  return seat.arena->TakeOver(seat.by, pieces, border_at, request);
}

void SegmentPool::ReleaseThoroughly(Arena& arena, Arena::By by, BlockRecord* block, uint64_t id) {
  if (by == Arena::By::kOther && arena.EnterLater(by, {block, id, 0}, nullptr)) return;
  Aftermath aftermath(arena.pool());
  arena.Enter(by, block, id, {}, &aftermath);
}

void SegmentPool::ReleaseAfter(BlockRecord* block, uint64_t id,
                               absl::Span<const FenceTicket> tickets) {
  Arena& arena = *BlockRecords::ArenaOf(block);
  if (arena.pool()->origin_.InForkedChild()) return;
  const FenceTicket* open = nullptr;
  bool only_one = true;
  for (const FenceTicket& ticket : tickets) {
    if (ticket.IsDone()) continue;
    only_one = open == nullptr;
    open = &ticket;
  }
  if (open == nullptr) return Release(block, id);
  const Arena::By by = arena.RoleOfThisThread();
  if (kHardened) arena.MarkReleased(by, block, id);
  if (only_one && arena.EnterLater(by, {block, id, open->value}, open->timeline)) return;
  Aftermath aftermath(arena.pool());
  if (arena.Enter(by, block, id, tickets, &aftermath)) return;
  // There is no memory to record the tickets, and maybe none to wait for them.
  try {
    const Deadline deadline(kWaitBeforeLeaking);
    for (const FenceTicket& ticket : tickets) {
      // The block is leaked. Statistics count it as in use.
      if (!ticket.Wait(deadline.Left()).ok()) return;
    }
  } catch (const std::bad_alloc&) {
    return;
  }
  if (kHardened) CheckAndPoisonBlock(*block);
  arena.Enter(by, block, id, {}, &aftermath);
}

void SegmentPool::CountDown(uint64_t blocks) {
  if (outliving_blocks_.fetch_sub(blocks, std::memory_order_acq_rel) != blocks) return;
  std::shared_ptr<SegmentPool> last;
  MutexLock lock(mu_);
  last = std::move(kept_by_blocks_);
}

DeferredReleases::NextTickets SegmentPool::Reclaim() {
  Aftermath aftermath(this);
  DeferredReleases::NextTickets next;
  const ArenaRound round(arenas_);
  for (const Seat& seat : round.seats()) seat.arena->Reclaim(seat.by, &next, &aftermath);
  return next;
}

bool SegmentPool::PollDeferred() {
  const DeferredReleases::NextTickets next = Reclaim();
  for (const auto& [timeline, _] : next) timeline->Poll();
  return !next.empty();
}

BlockRecord* SegmentPool::TakeDeferred(uint64_t size_bytes, absl::Duration longest_wait) {
  const bool some_left = PollDeferred();
  BlockRecord* block = TryAllocateThoroughly(size_bytes);
  if (block != nullptr) {
    ++polled_hits_;
  } else if (some_left && longest_wait > absl::ZeroDuration()) {
    ++waits_for_deferred_;
    block = WaitForDeferred(size_bytes, longest_wait);
    if (block != nullptr) ++waited_hits_;
  }
  return block;
}

BlockRecord* SegmentPool::WaitForDeferred(uint64_t size_bytes, absl::Duration timeout) {
  const Deadline deadline(timeout);
  while (true) {
    const DeferredReleases::NextTickets next = Reclaim();
    bool waited = false;
    for (const auto& [timeline, value] : next) {
      const absl::Duration left = deadline.Left();
      if (left == absl::ZeroDuration()) return nullptr;
      // A stuck timeline must not use up the time of the others.
      const absl::Duration share =
          std::max(kShortestWait, left / static_cast<int64_t>(next.size()));
      const absl::Status status = timeline->Wait(value, std::min(left, share));
      waited |= status.ok() || absl::IsDeadlineExceeded(status);
      BlockRecord* const block = TryAllocateThoroughly(size_bytes);
      if (block != nullptr) return block;
    }
    // Also without a ticket: another thread may have reclaimed the block.
    if (!waited) return TryAllocateThoroughly(size_bytes);
  }
}

BlockRecord* SegmentPool::AddSegment(const HostSegment& segment, uint64_t size_bytes) noexcept {
  if (kHardened) PoisonFree(segment.data, segment.size_bytes);
  const Seat mine = Mine();
  const uint64_t class_bytes = size_bytes == 0 ? 0 : BookedBytes(size_bytes);
  BlockRecord* block;
  {
    MutexLock lock(mu_);
    locked_bytes_.current += segment.size_bytes;
    locked_bytes_.total += segment.size_bytes;
    locked_bytes_.peak = std::max(locked_bytes_.peak, locked_bytes_.current);
    block = TakeOverLocked(mine, segments_.Add(segment), {size_bytes, class_bytes});
  }
  if (kHardened && block != nullptr) PrepareBlock(*block);
  return block;
}

LimitedSource::GivenBack SegmentPool::GiveBack(const SegmentMap::Removal& wanted) noexcept {
  if (wanted.bytes == 0) return {};
  Aftermath aftermath(this);
  std::vector<HostSegment> segments;
  {
    MutexLock lock(mu_);
    const ArenaRound round(arenas_);
    std::vector<std::vector<HostSegment>> free;
    for (const Seat& seat : round.seats()) free.push_back(seat.arena->GiveUp(seat.by, &aftermath));
    segments = segments_.RemoveFree(wanted, &free);
    for (size_t i = 0; i < free.size(); ++i) TakeOverLocked(round.seats()[i], free[i], {});
    locked_bytes_.current = segments_.total_bytes();
    if (!segments.empty()) ++trims_;
  }
  return source_.Unpin(segments);
}

uint64_t SegmentPool::RoomForLargeBlocks() {
  Aftermath aftermath(this);
  MutexLock lock(mu_);
  const ArenaRound round(arenas_);
  uint64_t bytes = 0;
  for (const Seat& seat : round.seats()) {
    bytes += seat.arena->RoomForLargeBlocks(seat.by, &aftermath);
  }
  return bytes;
}

uint64_t SegmentPool::locked_bytes() const {
  MutexLock lock(mu_);
  return locked_bytes_.current;
}

AllocatorStats SegmentPool::GetStats() {
  AllocatorStats stats;
  // A counter is read before the one that bounds it.
  stats.waited_hits = waited_hits_;
  stats.waits_for_deferred = waits_for_deferred_;
  stats.polled_hits = polled_hits_;
  {
    Aftermath aftermath(this);
    MutexLock lock(mu_);
    stats.numa_nodes = segments_.NumaNodes();
    const ArenaRound round(arenas_);
    for (const Seat& seat : round.seats()) seat.arena->AddStats(seat.by, &stats, &aftermath);
    stats.locked_bytes = locked_bytes_;
    stats.trims = trims_;
  }
  stats.hits = stats.allocations - stats.misses;
  std::erase_if(stats.size_buckets,
                [](const SizeBucketStats& bucket) { return bucket.allocations == 0; });
  stats.cached_bytes.total += stats.locked_bytes.total;
  // Memory that moved between arenas is in the cached peak of both.
  for (ByteGauge* gauge : {&stats.requested_bytes, &stats.booked_bytes, &stats.deferred_bytes,
                           &stats.used_bytes, &stats.cached_bytes}) {
    gauge->peak = std::min({gauge->peak, gauge->total, stats.locked_bytes.peak});
  }
  static_cast<SourceStats&>(stats) = source_.stats();
  return stats;
}

void SegmentPool::Abandon(std::shared_ptr<SegmentPool> pool) {
  if (pool->origin_.InForkedChild()) return KeepForEver(std::move(pool));
  {
    Aftermath aftermath(pool.get());
    uint64_t live_blocks = 0;
    {
      MutexLock lock(pool->mu_);
      pool->kept_by_blocks_ = pool;
      pool->outliving_blocks_ = kStillCounting;
      const ArenaRound round(pool->arenas_);
      for (const Seat& seat : round.seats()) live_blocks += seat.arena->Close(seat.by, &aftermath);
    }
    pool->CountDown(kStillCounting - live_blocks);
  }
  pool->GiveBack({});
}

absl::Status SegmentPool::WaitForAllDeferred(absl::Duration timeout) {
  const Deadline deadline(timeout);
  while (true) {
    bool progress = false;
    absl::Status failed;
    for (const auto& [timeline, value] : Reclaim()) {
      const absl::Status waited = FenceTicket{timeline, value}.Wait(deadline.Left());
      progress |= waited.ok();
      failed.Update(waited);
    }
    if (!progress) return failed;
  }
}

}  // namespace pinion::internal
