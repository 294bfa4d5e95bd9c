// The blocks that LibTorch holds: what the contexts of its DataPtrs are.
//
//   HeldBlock& held = blocks.Hold(std::move(block));  // a DataPtr's context
//   HeldBlock* found = blocks.FindByContext(data, context);  // null: no block of these
//   PinnedBlock block = blocks.LetGo(held);
//
// A record says by itself where its block is, and nothing else does: to hold a block and to let go
// of it touches the record and the thread's own list of unused ones. A block is found by its
// context at once. One that is named by an address alone, as a view that was made with from_blob()
// names it, is looked for among all records, one by one; whoever asks makes sure first that the
// address is of the blocks' memory (PinnedAllocator::Owns).
//
// Thread safety: thread-safe. What is looked for must be held as long as that takes, and until it
// is used; a use that comes later may hold back the record's next block.
// Ownership: of blocks while they are held, and of records for ever.

#ifndef PINION_HOOKS_PIN_MEMORY_HELD_BLOCKS_H_
#define PINION_HOOKS_PIN_MEMORY_HELD_BLOCKS_H_

#include <ATen/core/CachingHostAllocator.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/base/thread_slot.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/engine/tier/device_tier.h"
#include "pinion/hooks/autograd/torch_bridge.h"

namespace pinion {

// A stream that copies of a block ran on, and who can tell how far it is.
struct StreamUse {
  BoundStream stream;
  std::shared_ptr<DeviceTier> device;
};

// How copies have used a block.
struct BlockUses {
  absl::InlinedVector<StreamUse, 1> streams;
  absl::Status never_reusable;  // not OK: why
};

class HeldBlocks;

class HeldBlock {
 public:
  HeldBlocks& blocks() const { return *blocks_; }

  // By copies, since it was held. The thread that lets go of it.
  bool was_used() const { return used_.load(std::memory_order_relaxed); }
  // One more use. Any thread that holds the memory.
  void Use(const c10::Stream& stream, absl::StatusOr<StreamUse> use);
  // All uses so far, of which the record has none then. The thread that lets go of it.
  BlockUses TakeUses();

 private:
  friend class HeldBlocks;

  PinnedBlock block_;
  // The block's own record is in a line that the thread writes to which allocates next to it.
  int64_t capacity_bytes_ = 0;
  HeldBlocks* blocks_ = nullptr;
  int thread_ = 0;             // the number of the one that held it
  HeldBlock* next_ = nullptr;  // of the unused ones
  // The block's id, and where it is, for whoever looks through all records; 0: unused.
  std::atomic<uint64_t> id_ = 0;
  std::atomic<const char*> begin_ = nullptr;
  std::atomic<const char*> end_ = nullptr;
  // Whether an address lies in the block that is held now. Any thread.
  bool IsAt(const void* data) const;

  std::atomic<bool> used_ = false;  // that there are uses
  Mutex mu_;
  BlockUses uses_ ABSL_GUARDED_BY(mu_);
};

class HeldBlocks {
 public:
  // `holder` is for whoever only has the record.
  explicit HeldBlocks(void* holder) : holder_(holder) {}
  HeldBlocks(const HeldBlocks&) = delete;
  HeldBlocks& operator=(const HeldBlocks&) = delete;

  void* holder() const { return holder_; }

  HeldBlock& Hold(PinnedBlock&& block);
  PinnedBlock LetGo(HeldBlock& held);
  // The block that has the context and that `data` lies in; the block that `data` lies in.
  HeldBlock* FindByContext(const void* data, const void* context);
  HeldBlock* FindByAddress(const void* data);

  // What LibTorch's statistics say of requests, and of their bytes as booked. Exact but for peaks:
  // those of several threads are added.
  struct Stats {
    c10::CachingAllocator::Stat requests;
    c10::CachingAllocator::Stat bytes;
  };
  Stats GetStats();
  void ResetAccumulated();
  void ResetPeaks();

 private:
  // Written by one thread, but for what other threads let go of.
  class Count {
   public:
    void Rise(int64_t by) {
      Add(&risen_, by);
      const int64_t now = current();
      if (now > peak_.load(std::memory_order_relaxed)) peak_.store(now, std::memory_order_relaxed);
    }
    void FallHere(int64_t by) { Add(&fallen_here_, by); }
    void FallElsewhere(int64_t by) { fallen_elsewhere_.fetch_add(by, std::memory_order_relaxed); }
    void ResetPeak() { peak_.store(current(), std::memory_order_relaxed); }
    void AddTo(c10::CachingAllocator::Stat* stat) const;

   private:
    static void Add(std::atomic<int64_t>* sum, int64_t by) {
      sum->store(sum->load(std::memory_order_relaxed) + by, std::memory_order_relaxed);
    }
    int64_t fallen() const {
      return fallen_here_.load(std::memory_order_relaxed) +
             fallen_elsewhere_.load(std::memory_order_relaxed);
    }
    int64_t current() const { return risen_.load(std::memory_order_relaxed) - fallen(); }

    std::atomic<int64_t> risen_ = 0;
    std::atomic<int64_t> peak_ = 0;
    std::atomic<int64_t> fallen_here_ = 0;
    std::atomic<int64_t> fallen_elsewhere_ = 0;
  };

  // Of one thread: only it uses the list. The last one is used with mu_ held, by all threads that
  // have no number.
  struct alignas(128) Slot {
    HeldBlock* unused = nullptr;
    int unused_count = 0;
    Count requests;
    Count bytes;
  };

  // What one thread keeps of unused records.
  static constexpr int kMostUnused = 128;

  HeldBlock& HoldOn(int thread, PinnedBlock& block);
  PinnedBlock LetGoOn(int thread, HeldBlock& held);
  // With the lock: where there are no records, or too many, or all threads share the slot.
  HeldBlock& HoldThoroughly(int thread, PinnedBlock& block);
  PinnedBlock LetGoThoroughly(int thread, HeldBlock& held);
  // So many records that the thread takes none of the others' for a while.
  void Refill(Slot& slot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // What one thread has let go of serves those that hold.
  void HandBack(Slot& slot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Stats SumLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  static constexpr size_t kFirstChunk = 256;
  static size_t RecordsOf(size_t chunk) { return kFirstChunk << chunk; }

  void* const holder_;
  std::array<Slot, kThreadSlots + 1> slots_;
  // Each twice as long as the last one, so that there are few.
  std::array<std::atomic<HeldBlock*>, 32> chunks_ = {};

  Mutex mu_;
  std::vector<std::unique_ptr<HeldBlock[]>> records_ ABSL_GUARDED_BY(mu_);  // of the chunks
  HeldBlock* unused_ ABSL_GUARDED_BY(mu_) = nullptr;
  Stats before_reset_ ABSL_GUARDED_BY(mu_);  // what was accumulated then
};

inline HeldBlock& HeldBlocks::Hold(PinnedBlock&& block) {
  const int thread = ThreadSlot();
  const bool at_once = thread != kNoThreadSlot && slots_[thread].unused != nullptr;
  return at_once ? HoldOn(thread, block) : HoldThoroughly(thread, block);
}

inline HeldBlock& HeldBlocks::HoldOn(int thread, PinnedBlock& block) {
  Slot& slot = slots_[thread];
  HeldBlock& held = *slot.unused;
  slot.unused = held.next_;
  --slot.unused_count;
  slot.requests.Rise(1);
  held.capacity_bytes_ = static_cast<int64_t>(block.capacity_bytes());
  slot.bytes.Rise(held.capacity_bytes_);
  const char* const begin = static_cast<const char*>(block.data());
  held.thread_ = thread;
  held.begin_.store(begin, std::memory_order_release);
  held.end_.store(begin + block.size_bytes(), std::memory_order_release);
  held.id_.store(block.id(), std::memory_order_release);
  held.block_ = std::move(block);
  return held;
}

inline PinnedBlock HeldBlocks::LetGo(HeldBlock& held) {
  const int thread = ThreadSlot();
  const bool at_once = thread != kNoThreadSlot && slots_[thread].unused_count < kMostUnused;
  return at_once ? LetGoOn(thread, held) : LetGoThoroughly(thread, held);
}

inline PinnedBlock HeldBlocks::LetGoOn(int thread, HeldBlock& held) {
  const int64_t bytes = held.capacity_bytes_;
  Slot& slot = slots_[thread];
  if (held.thread_ == thread) {
    slot.requests.FallHere(1);
    slot.bytes.FallHere(bytes);
  } else {
    slots_[held.thread_].requests.FallElsewhere(1);
    slots_[held.thread_].bytes.FallElsewhere(bytes);
  }
  held.id_.store(0, std::memory_order_relaxed);
  held.next_ = slot.unused;
  slot.unused = &held;
  ++slot.unused_count;
  return std::move(held.block_);
}

}  // namespace pinion

#endif  // PINION_HOOKS_PIN_MEMORY_HELD_BLOCKS_H_
