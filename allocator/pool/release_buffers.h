// Where released blocks wait to be entered in the books, so that a thread that releases a block
// with a ticket does not wait for the one that allocates, nor fetch the books from its cache.
//
//   thread A  --|###  |
//   thread B  --|#####|--full: a batch-->  incoming, for the owner to enter
//
// Each thread adds to one of a few buffers (two threads may share one). A batch has tickets of one
// timeline only. What is full joins a list without a lock: whoever releases waits for nobody, but
// for a moment where another thread looks into its buffer.
//
// Thread safety: thread-safe. Calls FenceTimeline::Completed only.
// Ownership: a buffer and a batch share their timeline.

#ifndef PINION_ALLOCATOR_POOL_RELEASE_BUFFERS_H_
#define PINION_ALLOCATOR_POOL_RELEASE_BUFFERS_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>

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
  ReleaseBatch* next = nullptr;  // in the list of what is incoming
};

class ReleaseBuffers {
 public:
  using Batches = std::deque<std::unique_ptr<ReleaseBatch>>;

  ReleaseBuffers() = default;
  ~ReleaseBuffers();
  ReleaseBuffers(const ReleaseBuffers&) = delete;
  ReleaseBuffers& operator=(const ReleaseBuffers&) = delete;

  // Adds to this thread's buffer. False once the buffers are closed: then nothing was added.
  bool Add(const ReleaseBatch::Release& release, const std::shared_ptr<FenceTimeline>& timeline);

  // What this thread's buffer holds, into `batches`. False if that is nothing.
  bool TakeMine(Batches* batches);

  bool SomeIncoming() const { return incoming_.load(std::memory_order_relaxed) != nullptr; }

  // Full batches of all threads, each thread's in order.
  void TakeIncoming(Batches* batches) {
    if (SomeIncoming()) TakeIncomingList(batches);
  }

  // All that buffers and the list hold: every release that happened before.
  void TakeAll(Batches* batches) { Take(batches, /*close=*/false); }

  // The same, and takes no more.
  void Close(Batches* batches) { Take(batches, /*close=*/true); }

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
  // Into `batches`. False if there was nothing.
  static bool TakeFrom(Buffer& buffer, bool close, Batches* batches);
  void Take(Batches* batches, bool close);
  void TakeIncomingList(Batches* batches);
  void HandOver(std::unique_ptr<ReleaseBatch> batch);

  std::array<Buffer, 32> buffers_;
  alignas(128) std::atomic<ReleaseBatch*> incoming_ = nullptr;
};

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_POOL_RELEASE_BUFFERS_H_
