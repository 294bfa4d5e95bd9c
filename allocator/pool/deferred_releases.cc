#include "pinion/allocator/pool/deferred_releases.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace pinion::internal {
namespace {

constexpr auto kLaterFirst = [](const auto& a, const auto& b) { return a.value > b.value; };

}  // namespace

void DeferredReleases::Add(BlockRecord* block, const std::shared_ptr<FenceTimeline>& timeline,
                           uint64_t value) {
  ++block->pending_tickets;
  std::vector<Entry>& heap = QueueOf(timeline).heap;
  heap.push_back({value, block});
  std::push_heap(heap.begin(), heap.end(), kLaterFirst);
}

void DeferredReleases::TakeDone(std::vector<BlockRecord*>* done, Timelines* retired) {
  for (size_t i = 0; i < queues_.size();) {
    Queue& queue = queues_[i];
    const uint64_t completed = queue.timeline->Completed();
    while (!queue.heap.empty() && queue.heap.front().value <= completed) {
      BlockRecord* block = queue.heap.front().block;
      std::pop_heap(queue.heap.begin(), queue.heap.end(), kLaterFirst);
      queue.heap.pop_back();
      if (--block->pending_tickets == 0) done->push_back(block);
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
    tickets.push_back({queue.timeline, queue.heap.front().value});
  }
  return tickets;
}

DeferredReleases::Queue& DeferredReleases::QueueOf(const std::shared_ptr<FenceTimeline>& timeline) {
  for (Queue& queue : queues_) {
    if (queue.timeline == timeline) return queue;
  }
  queues_.push_back({timeline, {}});
  return queues_.back();
}

}  // namespace pinion::internal
