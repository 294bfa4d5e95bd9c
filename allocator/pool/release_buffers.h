// Where released blocks wait to be entered in the books, so that a thread that releases a block
// with a ticket does not wait for the one that allocates, nor fetch the books from its cache.
//
//   thread A  --|###  |
//   thread B  --|#####|--full: a batch-->  incoming, for the owner to enter
//
// Each thread adds to one of a few buffers (two threads may share one). A batch has tickets of one
// timeline only. What is full joins a list without a lock: whoever releases waits for nobody, but
// for a moment where another thread adds to the same buffer, or looks into it.
//
// Thread safety: ReleaseBuffers is thread-safe, BatchQueue is not. Calls FenceTimeline::Completed
// only.
// Ownership: a buffer and a batch share their timeline.

#ifndef PINION_ALLOCATOR_POOL_RELEASE_BUFFERS_H_
#define PINION_ALLOCATOR_POOL_RELEASE_BUFFERS_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "pinion/allocator/base/slab.h"
#include "pinion/allocator/fence.h"
#include "pinion/allocator/heap/segment.h"

namespace pinion::internal {

// Blocks that were released, in order; all tickets are of one timeline. One thread makes it and
// another one destroys it, which would wait for each other in malloc.
struct ReleaseBatch : SlabObject<ReleaseBatch> {
  // They count as live until they are entered.
  static constexpr uint32_t kCapacity = 16;

  struct Release {
    BlockRecord* block;
    uint64_t id;      // what the block's was when it was handed out
    uint64_t ticket;  // 0: none
  };

  // Whether the next one to be entered has a ticket that was not done when it was looked at last.
  bool NextWaits() const { return releases[entered].ticket > completed; }
  // What is done by now need not be deferred.
  void LookAgain() {
    if (NextWaits()) completed = timeline->Completed();
  }

  std::shared_ptr<FenceTimeline> timeline;  // null where none has a ticket
  uint64_t completed = 0;                   // of the timeline, when it was looked at last
  uint32_t size = 0;
  uint32_t entered = 0;       // of the releases, in their order
  bool seen_waiting = false;  // as the oldest one, when the arena looked around
  std::array<Release, kCapacity> releases;
  ReleaseBatch* next = nullptr;  // in the list or the queue that it is in
};

// Batches in a row. To move one in or out takes no memory, so that none is lost for want of it.
class BatchQueue {
 public:
  BatchQueue() = default;
  ~BatchQueue() {
    while (!empty()) pop_front();
  }
  BatchQueue(const BatchQueue&) = delete;
  BatchQueue& operator=(const BatchQueue&) = delete;

  bool empty() const { return first_ == nullptr; }
  size_t size() const { return size_; }
  ReleaseBatch& front() { return *first_; }
  const ReleaseBatch& front() const { return *first_; }

  void push_front(std::unique_ptr<ReleaseBatch> batch) {
    batch->next = first_;
    first_ = batch.release();
    if (last_ == nullptr) last_ = first_;
    ++size_;
  }
  void push_back(std::unique_ptr<ReleaseBatch> batch) {
    batch->next = nullptr;
    ReleaseBatch* const added = batch.release();
    (last_ == nullptr ? first_ : last_->next) = added;
    last_ = added;
    ++size_;
  }
  std::unique_ptr<ReleaseBatch> pop_front() {
    std::unique_ptr<ReleaseBatch> batch(first_);
    first_ = batch->next;
    if (first_ == nullptr) last_ = nullptr;
    --size_;
    return batch;
  }

 private:
  ReleaseBatch* first_ = nullptr;
  ReleaseBatch* last_ = nullptr;
  size_t size_ = 0;
};

class ReleaseBuffers {
 public:
  ReleaseBuffers() = default;
  ~ReleaseBuffers();
  ReleaseBuffers(const ReleaseBuffers&) = delete;
  ReleaseBuffers& operator=(const ReleaseBuffers&) = delete;

  // Adds to this thread's buffer. False once the buffers are closed, and where the C++ heap has no
  // memory for a batch: then nothing was added.
  bool Add(const ReleaseBatch::Release& release, const std::shared_ptr<FenceTimeline>& timeline);

  // What this thread's buffer holds; null if that is nothing.
  std::unique_ptr<ReleaseBatch> TakeMine();

  bool SomeIncoming() const { return incoming_.load(std::memory_order_relaxed) != nullptr; }

  // Full batches of all threads, each thread's in order.
  void TakeIncoming(BatchQueue* batches) {
    if (SomeIncoming()) TakeIncomingList(batches);
  }

  // All that buffers and the list hold: every release that happened before.
  void TakeAll(BatchQueue* batches) { Take(batches, /*close=*/false); }

  // The same, and takes no more.
  void Close(BatchQueue* batches) { Take(batches, /*close=*/true); }

 private:
  // Holds a batch, which one thread at a time takes out and puts back: as a lock around it would
  // be, for one atomic read-modify-write instead of two. A cache line each, and the next one, which
  // the processor fetches along with it.
  class alignas(128) Buffer {
   public:
    // Nothing is in it, as far as this thread knows.
    bool SeemsEmpty() const { return held_.load(std::memory_order_acquire) == kEmpty; }

    // False if it is closed. Else the caller has `batch`, or null, and other threads wait until it
    // calls Put or Close.
    bool Take(std::unique_ptr<ReleaseBatch>* batch) {
      uintptr_t held = held_.exchange(kTaken, std::memory_order_acquire);
      if (held == kTaken) [[unlikely]]
        held = TakeSlowly();
      if (held == kClosed) [[unlikely]] {
        Close();
        return false;
      }
      batch->reset(reinterpret_cast<ReleaseBatch*>(held));
      return true;
    }
    void Put(std::unique_ptr<ReleaseBatch> batch) {
      held_.store(reinterpret_cast<uintptr_t>(batch.release()), std::memory_order_release);
    }
    void Close() { held_.store(kClosed, std::memory_order_release); }

   private:
    // What is no batch's address.
    static constexpr uintptr_t kEmpty = 0;
    static constexpr uintptr_t kTaken = 1;
    static constexpr uintptr_t kClosed = 2;

    uintptr_t TakeSlowly();

    std::atomic<uintptr_t> held_ = kEmpty;
  };

  Buffer& Mine();
  // Null if there was nothing.
  static std::unique_ptr<ReleaseBatch> TakeFrom(Buffer& buffer, bool close);
  void Take(BatchQueue* batches, bool close);
  void TakeIncomingList(BatchQueue* batches);
  void HandOver(std::unique_ptr<ReleaseBatch> batch);

  std::array<Buffer, 32> buffers_;
  alignas(128) std::atomic<ReleaseBatch*> incoming_ = nullptr;
};

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_POOL_RELEASE_BUFFERS_H_
