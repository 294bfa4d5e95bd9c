// Tracks the pinned blocks that LibTorch holds. The context of each DataPtr is a HeldBlock.
//
//   HeldBlock& held = blocks.Hold(std::move(block));  // a DataPtr's context
//   HeldBlock* found = blocks.FindByContext(data, context);  // null: not held here
//   PinnedBlock block = blocks.LetGo(held);
//
// Hold and LetGo usually touch only the record and the calling thread's list of unused records.
// FindByContext takes constant time. FindByAddress, which serves views made by from_blob(), scans
// all records: check PinnedAllocator::Owns first.
//
// Thread safety: thread-safe. A block that is looked up must stay held until the caller is done
// with the result. A late Use() may delay the reuse of the record's next block.
// Ownership: owns blocks while they are held. Records are never freed.

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

// A stream that copied from or to a block, and the device tier that tracks its progress.
struct StreamUse {
  BoundStream stream;
  std::shared_ptr<DeviceTier> device;
};

// All uses of a block by copies.
struct BlockUses {
  absl::InlinedVector<StreamUse, 1> streams;
  absl::Status never_reusable;  // an error says why the block can never be reused
};

class HeldBlocks;

class HeldBlock {
 public:
  HeldBlocks& blocks() const { return *blocks_; }

  // Returns whether copies have used the block since Hold. For the thread that calls LetGo.
  bool was_used() const { return used_.load(std::memory_order_relaxed); }
  // Adds a use. Any thread that holds the memory may call this.
  void Use(const c10::Stream& stream, absl::StatusOr<StreamUse> use);
  // Returns and clears the uses. For the thread that calls LetGo.
  BlockUses TakeUses();

 private:
  friend class HeldBlocks;

  PinnedBlock block_;
  // A copy: the block's own record shares a cache line that other threads write.
  int64_t capacity_bytes_ = 0;
  HeldBlocks* blocks_ = nullptr;
  int thread_ = 0;             // slot of the thread that called Hold
  HeldBlock* next_ = nullptr;  // next unused record
  // The block's id and address range, for lookups. The id of an unused record is 0.
  std::atomic<uint64_t> id_ = 0;
  std::atomic<const char*> begin_ = nullptr;
  std::atomic<const char*> end_ = nullptr;
  // Returns whether `data` lies in the block that is held. Any thread may call this.
  bool IsAt(const void* data) const;

  std::atomic<bool> used_ = false;  // whether uses_ has any
  Mutex mu_;
  BlockUses uses_ ABSL_GUARDED_BY(mu_);
};

class HeldBlocks {
 public:
  // `holder` is returned by holder(), so that a record leads to its owner.
  explicit HeldBlocks(void* holder) : holder_(holder) {}
  HeldBlocks(const HeldBlocks&) = delete;
  HeldBlocks& operator=(const HeldBlocks&) = delete;

  void* holder() const { return holder_; }

  HeldBlock& Hold(PinnedBlock&& block);
  PinnedBlock LetGo(HeldBlock& held);
  // Return the record with `context` if its block contains `data`, or the record whose block
  // contains `data`; else null.
  HeldBlock* FindByContext(const void* data, const void* context);
  HeldBlock* FindByAddress(const void* data);

  // Requests, and their bytes including rounding. Exact, except that a peak is the sum of the
  // threads' peaks.
  struct Stats {
    c10::CachingAllocator::Stat requests;
    c10::CachingAllocator::Stat bytes;
  };
  Stats GetStats();
  void ResetAccumulated();
  void ResetPeaks();

 private:
  // Written by one thread, except fallen_elsewhere_.
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

  // One thread's records and counts. Threads without a slot share the last one, under mu_.
  struct alignas(128) Slot {
    HeldBlock* unused = nullptr;
    int unused_count = 0;
    Count requests;
    Count bytes;
  };

  // The most unused records that a thread keeps.
  static constexpr int kMostUnused = 128;

  HeldBlock& HoldOn(int thread, PinnedBlock& block);
  PinnedBlock LetGoOn(int thread, HeldBlock& held);
  // Slow paths under mu_: the thread has no unused records, too many, or no slot of its own.
  HeldBlock& HoldThoroughly(int thread, PinnedBlock& block);
  PinnedBlock LetGoThoroughly(int thread, HeldBlock& held);
  // Moves a batch of unused records to the slot.
  void Refill(Slot& slot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Moves a batch of the slot's unused records to all threads.
  void HandBack(Slot& slot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Stats SumLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  static constexpr size_t kFirstChunk = 256;
  static size_t RecordsOf(size_t chunk) { return kFirstChunk << chunk; }

  void* const holder_;
  std::array<Slot, kThreadSlots + 1> slots_;
  // Chunk n has kFirstChunk << n records, so lookups visit few chunks.
  std::array<std::atomic<HeldBlock*>, 32> chunks_ = {};

  Mutex mu_;
  std::vector<std::unique_ptr<HeldBlock[]>> records_ ABSL_GUARDED_BY(mu_);  // memory of chunks_
  HeldBlock* unused_ ABSL_GUARDED_BY(mu_) = nullptr;
  Stats before_reset_ ABSL_GUARDED_BY(mu_);  // totals at the last ResetAccumulated
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
