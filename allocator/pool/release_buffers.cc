#include "pinion/allocator/pool/release_buffers.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace pinion::internal {
namespace {

constexpr size_t kCacheLineBytes = 64;

std::atomic<uint32_t> threads_seen{0};

uint32_t ThreadNumber() {
  thread_local uint32_t number = 0;
  if (number == 0) number = threads_seen.fetch_add(1, std::memory_order_relaxed) + 1;
  return number;
}

std::unique_ptr<ReleaseBatch> Stamped(std::unique_ptr<ReleaseBatch> batch) {
  batch->completed = batch->timeline == nullptr ? 0 : batch->timeline->Completed();
  return batch;
}

}  // namespace

ReleaseBuffers::~ReleaseBuffers() {
  Batches left;
  TakeIncoming(&left);
}

bool ReleaseBuffers::Add(const ReleaseBatch::Release& release,
                         const std::shared_ptr<FenceTimeline>& timeline) {
  Buffer& buffer = Mine();
  MutexLock lock(buffer.mu);
  if (buffer.closed) return false;
  if (buffer.batch != nullptr && timeline != nullptr && buffer.batch->timeline != nullptr &&
      buffer.batch->timeline != timeline) {
    HandOver(std::move(buffer.batch));
  }
  if (buffer.batch == nullptr) {
    buffer.batch = std::make_unique<ReleaseBatch>();
    buffer.used.store(true, std::memory_order_relaxed);
  }
  ReleaseBatch& batch = *buffer.batch;
  if (batch.timeline == nullptr) batch.timeline = timeline;
  batch.releases[batch.size++] = release;
  if (batch.size == ReleaseBatch::kCapacity) {
    HandOver(std::move(buffer.batch));
  }
  return true;
}

bool ReleaseBuffers::TakeMine(Batches* batches) {
  Buffer& buffer = Mine();
  if (!buffer.used.load(std::memory_order_relaxed)) return false;
  MutexLock lock(buffer.mu);
  buffer.used.store(false, std::memory_order_relaxed);
  if (buffer.batch == nullptr) return false;
  batches->push_back(Stamped(std::move(buffer.batch)));
  return true;
}

ReleaseBuffers::Buffer& ReleaseBuffers::Mine() {
  return buffers_[ThreadNumber() % buffers_.size()];
}

void ReleaseBuffers::Take(Batches* batches, bool close) {
  for (Buffer& buffer : buffers_) {
    if (!close && !buffer.used.load(std::memory_order_acquire)) continue;
    MutexLock lock(buffer.mu);
    buffer.closed |= close;
    buffer.used.store(false, std::memory_order_relaxed);
    if (buffer.batch != nullptr) batches->push_back(Stamped(std::move(buffer.batch)));
  }
  TakeIncoming(batches);
}

void ReleaseBuffers::TakeIncomingList(Batches* batches) {
  ReleaseBatch* next = incoming_.exchange(nullptr, std::memory_order_acquire);
  const auto known = static_cast<ptrdiff_t>(batches->size());
  while (next != nullptr) {
    batches->emplace_back(next);
    // Another processor wrote it; it is read a little at a time.
    for (size_t line = 0; line < sizeof(ReleaseBatch); line += kCacheLineBytes) {
      __builtin_prefetch(reinterpret_cast<const char*>(next) + line);
    }
    next = next->next;
  }
  std::reverse(batches->begin() + known, batches->end());
}

void ReleaseBuffers::HandOver(std::unique_ptr<ReleaseBatch> batch) {
  // Read before `Completed()` is called, so that a batch that another thread hands over during that
  // call is met by the retry below. Tests hand one over from within it.
  batch->next = incoming_.load(std::memory_order_relaxed);
  ReleaseBatch* const added = Stamped(std::move(batch)).release();
  while (!incoming_.compare_exchange_weak(added->next, added, std::memory_order_release,
                                          std::memory_order_relaxed)) {
  }
}

}  // namespace pinion::internal
