#include "pinion/allocator/pool/release_buffers.h"

#include <new>
#include <utility>

#include "absl/cleanup/cleanup.h"

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

// Returns null if there is no memory, because a release cannot fail.
std::unique_ptr<ReleaseBatch> NewBatch() {
  try {
    return std::make_unique<ReleaseBatch>();
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

}  // namespace

ReleaseBuffers::~ReleaseBuffers() {
  BatchQueue left;
  TakeAll(&left, /*close=*/true);
}

bool ReleaseBuffers::Add(const ReleaseBatch::Release& release,
                         const std::shared_ptr<FenceTimeline>& timeline) {
  Buffer& buffer = Mine();
  std::unique_ptr<ReleaseBatch> batch;
  if (!buffer.Take(&batch)) return false;
  const absl::Cleanup put_back = [&] { buffer.Put(std::move(batch)); };
  if (batch != nullptr && timeline != nullptr && batch->timeline != nullptr &&
      batch->timeline != timeline) {
    HandOver(std::move(batch));
  }
  if (batch == nullptr) batch = NewBatch();
  if (batch == nullptr) return false;
  if (batch->timeline == nullptr) batch->timeline = timeline;
  batch->releases[batch->size++] = release;
  if (batch->size == ReleaseBatch::kCapacity) HandOver(std::move(batch));
  return true;
}

std::unique_ptr<ReleaseBatch> ReleaseBuffers::TakeMine() {
  Buffer& buffer = Mine();
  return buffer.SeemsEmpty() ? nullptr : TakeFrom(buffer, /*close=*/false);
}

std::unique_ptr<ReleaseBatch> ReleaseBuffers::TakeFrom(Buffer& buffer, bool close) {
  std::unique_ptr<ReleaseBatch> batch;
  if (!buffer.Take(&batch)) return nullptr;
  close ? buffer.Close() : buffer.Put(nullptr);
  return batch == nullptr ? nullptr : Stamped(std::move(batch));
}

ReleaseBuffers::Buffer& ReleaseBuffers::Mine() {
  return buffers_[ThreadNumber() % buffers_.size()];
}

void ReleaseBuffers::TakeAll(BatchQueue* batches, bool close) {
  for (Buffer& buffer : buffers_) {
    if (!close && buffer.SeemsEmpty()) continue;
    if (std::unique_ptr<ReleaseBatch> batch = TakeFrom(buffer, close); batch != nullptr) {
      batches->push_back(std::move(batch));
    }
  }
  TakeIncoming(batches);
}

void ReleaseBuffers::TakeIncoming(BatchQueue* batches) {
  if (!SomeIncoming()) return;
  ReleaseBatch* newest = incoming_.exchange(nullptr, std::memory_order_acquire);
  BatchQueue taken;
  while (newest != nullptr) {
    // Another processor wrote the batch, so all of its lines are prefetched.
    for (size_t line = 0; line < sizeof(ReleaseBatch); line += kCacheLineBytes) {
      __builtin_prefetch(reinterpret_cast<const char*>(newest) + line);
    }
    std::unique_ptr<ReleaseBatch> batch(newest);
    newest = batch->next;
    taken.push_front(std::move(batch));
  }
  while (!taken.empty()) batches->push_back(taken.pop_front());
}

void ReleaseBuffers::HandOver(std::unique_ptr<ReleaseBatch> batch) {
  // Read before `Completed()` is called: the retry below then handles a batch that another thread
  // hands over during that call. Tests do so.
  batch->next = incoming_.load(std::memory_order_relaxed);
  ReleaseBatch* const added = Stamped(std::move(batch)).release();
  while (!incoming_.compare_exchange_weak(added->next, added, std::memory_order_release,
                                          std::memory_order_relaxed)) {
  }
}

}  // namespace pinion::internal
