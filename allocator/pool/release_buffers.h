// Buffers for released blocks, so that a thread that releases a block neither waits for the
// allocating thread nor touches the cache lines of its books.
//
//   thread A  --|###  |
//   thread B  --|#####|--full: a batch-->  incoming, for the owner to enter
//
// Each thread adds to one of a few buffers; two threads may share one. A batch has tickets of one
// timeline only. Full batches join a lock-free list. A release waits only while another thread uses
// the same buffer.
//
// Thread safety: ReleaseBuffers is thread-safe, BatchQueue is not. Calls FenceTimeline::Completed
// only. Ownership: a buffer and a batch share their timeline.

#ifndef PINION_ALLOCATOR_POOL_RELEASE_BUFFERS_H_
#define PINION_ALLOCATOR_POOL_RELEASE_BUFFERS_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/base/slab.h"
#include "pinion/allocator/fence.h"
#include "pinion/allocator/heap/block_records.h"

namespace pinion::internal {

// Released blocks in order, with tickets of one timeline. From a slab, because one thread makes a
// batch and another one destroys it, which malloc would slow down.
struct ReleaseBatch : SlabObject<ReleaseBatch> {
  // Blocks in a batch count as live.
  static constexpr uint32_t kCapacity = 16;

  struct Release {
    BlockRecord* block;
    uint64_t id;      // of the block, when it was allocated
    uint64_t ticket;  // 0: none
  };

  // Returns whether the next release has a ticket that is not known to be done.
  bool NextWaits() const { return releases[entered].ticket > completed; }
  // Updates `completed` if the next release waits.
  void LookAgain() {
    if (NextWaits()) completed = timeline->Completed();
  }

  std::shared_ptr<FenceTimeline> timeline;  // null if no release has a ticket
  uint64_t completed = 0;                   // of the timeline, when last read
  uint32_t size = 0;
  uint32_t entered = 0;       // number of releases that are in the books
  bool seen_waiting = false;  // was the oldest batch at the last look around
  std::array<Release, kCapacity> releases;
  ReleaseBatch* next = nullptr;  // in its list or queue
};

// A queue of batches. Moving a batch allocates no memory, so it cannot fail.
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

  // Adds a release to this thread's buffer. Returns false, and adds nothing, if the buffers are
  // closed or the C++ heap is full.
  bool Add(const ReleaseBatch::Release& release, const std::shared_ptr<FenceTimeline>& timeline);

  // Returns the batch of this thread's buffer, or null if it is empty.
  std::unique_ptr<ReleaseBatch> TakeMine();

  bool SomeIncoming() const { return incoming_.load(std::memory_order_relaxed) != nullptr; }

  // Moves the full batches of all threads to `batches`, each thread's in order.
  void TakeIncoming(BatchQueue* batches);

  // Moves all batches to `batches`, with every release that happened before. Maybe closes the
  // buffers.
  void TakeAll(BatchQueue* batches, bool close = false);

 private:
  // Holds a batch that one thread at a time takes out and puts back. This works like a lock, with
  // one atomic read-modify-write instead of two. 128 bytes, because processors prefetch cache lines
  // in pairs.
  class alignas(128) Buffer {
   public:
    // Returns whether the buffer is empty, as far as this thread knows.
    bool SeemsEmpty() const { return held_.load(std::memory_order_acquire) == kEmpty; }

    // Returns false if the buffer is closed. Otherwise sets `batch` (maybe to null), and other
    // threads wait until the caller calls Put or Close.
    bool Take(std::unique_ptr<ReleaseBatch>* batch) {
      uintptr_t held = held_.exchange(kTaken, std::memory_order_acquire);
      for (Spin spin; held == kTaken; held = held_.exchange(kTaken, std::memory_order_acquire)) {
        spin.Wait();
      }
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
    // Values that are no batch's address.
    static constexpr uintptr_t kEmpty = 0;
    static constexpr uintptr_t kTaken = 1;
    static constexpr uintptr_t kClosed = 2;

    std::atomic<uintptr_t> held_ = kEmpty;
  };

  Buffer& Mine();
  // Returns null if the buffer was empty.
  static std::unique_ptr<ReleaseBatch> TakeFrom(Buffer& buffer, bool close);
  void HandOver(std::unique_ptr<ReleaseBatch> batch);

  std::array<Buffer, 32> buffers_;
  alignas(128) std::atomic<ReleaseBatch*> incoming_ = nullptr;
};

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_POOL_RELEASE_BUFFERS_H_
