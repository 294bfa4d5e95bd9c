#include "pinion/allocator/pool/pool_books.h"

#include <atomic>
#include <new>
#include <utility>

#include "pinion/allocator/base/bytes.h"

namespace pinion::internal {
namespace {

// Arenas take ids by the chunk, so that an allocation needs no shared atomic operation.
constexpr uint64_t kIdsPerChunk = 4096;
std::atomic<uint64_t> next_chunk_of_ids{1};

// A slab is 1/64 of a segment, within these bounds.
constexpr uint64_t kLeastSlabBytes = 64 * kKiB;
constexpr uint64_t kMostSlabBytes = 2 * kMiB;

uint64_t SlabBytes(uint64_t segment_bytes) {
  return std::clamp(segment_bytes / 64, kLeastSlabBytes, kMostSlabBytes);
}

ByteGauge GaugeOf(uint64_t current, uint64_t peak_before, uint64_t total) {
  return {current, std::max(peak_before, current), total};
}

void Add(const ByteGauge& gauge, ByteGauge* sum) {
  sum->current += gauge.current;
  sum->peak += gauge.peak;
  sum->total += gauge.total;
}

constexpr auto kLaterFirst = [](const auto& a, const auto& b) { return a.value > b.value; };

}  // namespace

bool DeferredReleases::MakeRoom(const std::shared_ptr<FenceTimeline>& timeline, size_t count) {
  try {
    if (Queue* const queue = QueueOf(timeline); queue != nullptr) {
      const size_t needed = queue->heap.size() + count;
      if (needed <= queue->heap.capacity()) return true;
      queue->heap.reserve(std::max(needed, 2 * queue->heap.capacity()));
    } else {
      Queue added = {timeline, {}};
      added.heap.reserve(count);
      queues_.push_back(std::move(added));
    }
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

void DeferredReleases::Add(BlockRecord* block, const std::shared_ptr<FenceTimeline>& timeline,
                           uint64_t value) {
  ++block->pending_tickets;
  std::vector<Entry>& heap = QueueOf(timeline)->heap;
  heap.push_back({value, block});
  std::push_heap(heap.begin(), heap.end(), kLaterFirst);
}

void DeferredReleases::TakeDone(absl::FunctionRef<void(BlockRecord*)> done, Timelines* retired) {
  for (size_t i = 0; i < queues_.size();) {
    Queue& queue = queues_[i];
    const uint64_t completed = queue.timeline->Completed();
    while (!queue.heap.empty() && queue.heap.front().value <= completed) {
      BlockRecord* block = queue.heap.front().block;
      std::pop_heap(queue.heap.begin(), queue.heap.end(), kLaterFirst);
      queue.heap.pop_back();
      if (--block->pending_tickets == 0) done(block);
    }
    if (queue.heap.empty()) {
      retired->push_back(std::move(queue.timeline));
      std::swap(queue, queues_.back());
      queues_.pop_back();
    } else {
      ++i;
    }
  }
}

void DeferredReleases::AddNextTickets(NextTickets* next) const {
  for (const Queue& queue : queues_) {
    if (queue.heap.empty()) continue;
    const uint64_t value = queue.heap.front().value;
    const auto known = std::find_if(next->begin(), next->end(), [&](const FenceTicket& ticket) {
      return ticket.timeline == queue.timeline;
    });
    if (known == next->end()) {
      next->push_back({queue.timeline, value});
    } else {
      known->value = std::min(known->value, value);
    }
  }
}

DeferredReleases::Queue* DeferredReleases::QueueOf(const std::shared_ptr<FenceTimeline>& timeline) {
  for (Queue& queue : queues_) {
    if (queue.timeline == timeline) return &queue;
  }
  return nullptr;
}

PoolBooks::PoolBooks(uint64_t alignment_bytes, uint64_t segment_bytes, Arena* arena)
    : heap_(alignment_bytes, SlabBytes(segment_bytes), arena) {}

void PoolBooks::TakeIds() {
  next_id_ = next_chunk_of_ids.fetch_add(kIdsPerChunk, std::memory_order_relaxed);
  end_of_ids_ = next_id_ + kIdsPerChunk;
}

void PoolBooks::MarkReleased(BlockRecord* block, uint64_t id) {
  CheckReleased(*block, id, BlockState::kLive);
  block->state = BlockState::kReleased;
}

bool PoolBooks::Enter(const ReleaseBatch::Release& release,
                      const std::shared_ptr<FenceTimeline>& timeline, uint64_t completed) {
  BlockRecord* const block = release.block;
  const bool waits = release.ticket > completed;
  if (waits && !MakeRoomToDefer(timeline, 1)) return false;
  CountRelease(block, release.id);
  if (waits) {
    Defer(block, timeline, release.ticket);
    return true;
  }
  if (kHardened && release.ticket != 0) CheckAndPoisonBlock(*block);
  heap_.Put(block);
  return true;
}

void PoolBooks::Defer(BlockRecord* block, const std::shared_ptr<FenceTimeline>& timeline,
                      uint64_t value) {
  if (block->state != BlockState::kDeferred) {
    block->state = BlockState::kDeferred;
    block->pending_tickets = 0;
    deferred_bytes_.current += block->capacity_bytes;
    deferred_bytes_.total += block->capacity_bytes;
    deferred_bytes_.peak = std::max(deferred_bytes_.peak, deferred_bytes_.current);
  }
  deferred_.Add(block, timeline, value);
}

void PoolBooks::Reclaim(DeferredReleases::Timelines* retired) {
  const auto free = [this](BlockRecord* block) {
    if (kHardened) CheckAndPoisonBlock(*block);
    if (!falls_) NoteBeforeFall();
    deferred_bytes_.current -= block->capacity_bytes;
    heap_.Put(block);
  };
  deferred_.TakeDone(free, retired);
}

BlockRecord* PoolBooks::AddSegments(absl::Span<const HostSegment> segments,
                                    SegmentHeap::BorderAt border_at, uint64_t size_bytes,
                                    uint64_t class_bytes) {
  NoteBeforeRise();
  for (const HostSegment& segment : segments) heap_.AddSegment(segment, border_at);
  BlockRecord* const block = size_bytes == 0 ? nullptr : Take(size_bytes, class_bytes);
  if (block != nullptr) {
    ++misses_[IndexOf(class_bytes)];
    grown_bytes_ += class_bytes;
  }
  peak_cached_bytes_ = std::max(peak_cached_bytes_, cached_bytes());
  return block;
}

std::vector<HostSegment> PoolBooks::RemoveFreeSegments(uint64_t bytes, uint64_t hole_bytes) {
  peak_cached_bytes_ = std::max(peak_cached_bytes_, cached_bytes());
  return heap_.RemoveFreeSegments(bytes, hole_bytes);
}

std::vector<HostSegment> PoolBooks::RemoveFreeEnd(const HostSegment& range) {
  peak_cached_bytes_ = std::max(peak_cached_bytes_, cached_bytes());
  return heap_.RemoveFreeEnd(range);
}

uint64_t PoolBooks::RoomForLargeBlocks() {
  heap_.DissolveFreeSlabs();
  return heap_.large_free_bytes();
}

uint64_t PoolBooks::allocations() const {
  uint64_t sum = 0;
  for (const Bucket& bucket : buckets_) sum += bucket.allocations;
  return sum;
}

void PoolBooks::AddStats(AllocatorStats* sum) const {
  uint64_t taken_bytes = 0;
  sum->size_buckets.resize(kLevels);
  for (size_t i = 0; i < kLevels; ++i) {
    const ByteGauge booked = buckets_[i].booked_bytes.ToGauge();
    SizeBucketStats& bucket = sum->size_buckets[i];
    bucket.from_bytes = kMinBlockBytes << i;
    bucket.allocations += buckets_[i].allocations;
    bucket.misses += misses_[i];
    Add(booked, &bucket.booked_bytes);
    sum->misses += misses_[i];
    taken_bytes += booked.total;
  }
  sum->allocations += allocations();
  Add(requested_bytes_.ToGauge(), &sum->requested_bytes);
  Add(GaugeOf(booked_bytes(), peak_booked_bytes_, taken_bytes), &sum->booked_bytes);
  Add(deferred_bytes_, &sum->deferred_bytes);
  Add(GaugeOf(used_bytes(), peak_used_bytes_, taken_bytes), &sum->used_bytes);
  const uint64_t put_bytes = taken_bytes - used_bytes();
  Add(GaugeOf(cached_bytes(), peak_cached_bytes_, put_bytes - grown_bytes_), &sum->cached_bytes);
  const std::map<int, uint64_t> used_bytes_of = heap_.UsedBytesByNode();
  for (NumaNodeStats& node : sum->numa_nodes) {
    if (const auto used = used_bytes_of.find(node.numa_node); used != used_bytes_of.end()) {
      node.used_bytes += used->second;
    }
  }
}

}  // namespace pinion::internal
