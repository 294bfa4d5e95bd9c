#include "pinion/allocator/pool/deferred_releases.h"

#include <algorithm>
#include <new>
#include <utility>

namespace pinion::internal {
namespace {

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

std::vector<FenceTicket> DeferredReleases::NextTickets() const {
  std::vector<FenceTicket> tickets;
  tickets.reserve(queues_.size());
  for (const Queue& queue : queues_) {
    if (!queue.heap.empty()) tickets.push_back({queue.timeline, queue.heap.front().value});
  }
  return tickets;
}

DeferredReleases::Queue* DeferredReleases::QueueOf(const std::shared_ptr<FenceTimeline>& timeline) {
  for (Queue& queue : queues_) {
    if (queue.timeline == timeline) return &queue;
  }
  return nullptr;
}

}  // namespace pinion::internal
