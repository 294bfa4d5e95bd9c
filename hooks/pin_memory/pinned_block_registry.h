// Tracks the pinned blocks that LibTorch holds. The context of each DataPtr is a PinnedBlockRecord.
//
//   PinnedBlockRecord& record = registry.Add(std::move(block));        // a DataPtr's context
//   PinnedBlockRecord* found = registry.FindByContext(data, context);  // null: of no block here
//   PinnedBlock block = registry.Remove(record);
//
// Add and Remove usually touch only the record and the calling thread's list of unused records.
// FindByContext takes constant time. FindByAddress, which serves views made by from_blob(), scans
// all records: check PinnedAllocator::Owns first.
//
// Thread safety: thread-safe. A block that is looked up must not be removed until the caller is
// done with the result. A late Use() may delay the reuse of the record's next block.
// Ownership: owns blocks until Remove. Records are never freed.

#ifndef PINION_HOOKS_PIN_MEMORY_PINNED_BLOCK_REGISTRY_H_
#define PINION_HOOKS_PIN_MEMORY_PINNED_BLOCK_REGISTRY_H_

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

class PinnedBlockRegistry;

class PinnedBlockRecord {
 public:
  PinnedBlockRegistry& registry() const { return *registry_; }

  // Returns whether copies have used the block since Add. For the thread that calls Remove.
  bool was_used() const { return used_.load(std::memory_order_relaxed); }
  // Adds a use. Any thread that holds the memory may call this.
  void Use(const c10::Stream& stream, absl::StatusOr<StreamUse> use);
  // Returns and clears the uses. For the thread that calls Remove.
  BlockUses TakeUses();

 private:
  friend class PinnedBlockRegistry;

  PinnedBlock block_;
  // A copy: the block's own record shares a cache line that other threads write.
  int64_t capacity_bytes_ = 0;
  PinnedBlockRegistry* registry_ = nullptr;
  int thread_ = 0;                     // slot of the thread that called Add
  PinnedBlockRecord* next_ = nullptr;  // next unused record
  // The block's id and address range, for lookups. The id of an unused record is 0.
  std::atomic<uint64_t> id_ = 0;
  std::atomic<const char*> begin_ = nullptr;
  std::atomic<const char*> end_ = nullptr;
  // Returns whether `data` lies in the record's block. Any thread may call this.
  bool IsAt(const void* data) const;

  std::atomic<bool> used_ = false;  // whether uses_ has any
  Mutex mu_;
  BlockUses uses_ ABSL_GUARDED_BY(mu_);
};

class PinnedBlockRegistry {
 public:
  // `holder` is returned by holder(), so that a record leads to its owner.
  explicit PinnedBlockRegistry(void* holder) : holder_(holder) {}
  PinnedBlockRegistry(const PinnedBlockRegistry&) = delete;
  PinnedBlockRegistry& operator=(const PinnedBlockRegistry&) = delete;

  void* holder() const { return holder_; }

  PinnedBlockRecord& Add(PinnedBlock&& block);
  PinnedBlock Remove(PinnedBlockRecord& record);
  // Return the record with `context` if its block contains `data`, or the record whose block
  // contains `data`; else null.
  PinnedBlockRecord* FindByContext(const void* data, const void* context);
  PinnedBlockRecord* FindByAddress(const void* data);

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
    PinnedBlockRecord* unused = nullptr;
    int unused_count = 0;
    Count requests;
    Count bytes;
  };

  // The most unused records that a thread keeps.
  static constexpr int kMostUnused = 128;

  PinnedBlockRecord& AddOn(int thread, PinnedBlock& block);
  PinnedBlock RemoveOn(int thread, PinnedBlockRecord& record);
  // Slow paths under mu_: the thread has no unused records, too many, or no slot of its own.
  PinnedBlockRecord& AddSlowly(int thread, PinnedBlock& block);
  PinnedBlock RemoveSlowly(int thread, PinnedBlockRecord& record);
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
  std::array<std::atomic<PinnedBlockRecord*>, 32> chunks_ = {};

  Mutex mu_;
  // The memory of chunks_.
  std::vector<std::unique_ptr<PinnedBlockRecord[]>> records_ ABSL_GUARDED_BY(mu_);
  PinnedBlockRecord* unused_ ABSL_GUARDED_BY(mu_) = nullptr;
  Stats before_reset_ ABSL_GUARDED_BY(mu_);  // totals at the last ResetAccumulated
};

inline PinnedBlockRecord& PinnedBlockRegistry::Add(PinnedBlock&& block) {
  const int thread = ThreadSlot();
  const bool at_once = thread != kNoThreadSlot && slots_[thread].unused != nullptr;
  return at_once ? AddOn(thread, block) : AddSlowly(thread, block);
}

inline PinnedBlockRecord& PinnedBlockRegistry::AddOn(int thread, PinnedBlock& block) {
  Slot& slot = slots_[thread];
  PinnedBlockRecord& record = *slot.unused;
  slot.unused = record.next_;
  --slot.unused_count;
  slot.requests.Rise(1);
  record.capacity_bytes_ = static_cast<int64_t>(block.capacity_bytes());
  slot.bytes.Rise(record.capacity_bytes_);
  const char* const begin = static_cast<const char*>(block.data());
  record.thread_ = thread;
  record.begin_.store(begin, std::memory_order_release);
  record.end_.store(begin + block.size_bytes(), std::memory_order_release);
  record.id_.store(block.id(), std::memory_order_release);
  record.block_ = std::move(block);
  return record;
}

inline PinnedBlock PinnedBlockRegistry::Remove(PinnedBlockRecord& record) {
  const int thread = ThreadSlot();
  const bool at_once = thread != kNoThreadSlot && slots_[thread].unused_count < kMostUnused;
  return at_once ? RemoveOn(thread, record) : RemoveSlowly(thread, record);
}

inline PinnedBlock PinnedBlockRegistry::RemoveOn(int thread, PinnedBlockRecord& record) {
  const int64_t bytes = record.capacity_bytes_;
  Slot& slot = slots_[thread];
  if (record.thread_ == thread) {
    slot.requests.FallHere(1);
    slot.bytes.FallHere(bytes);
  } else {
    slots_[record.thread_].requests.FallElsewhere(1);
    slots_[record.thread_].bytes.FallElsewhere(bytes);
  }
  record.id_.store(0, std::memory_order_relaxed);
  record.next_ = slot.unused;
  slot.unused = &record;
  ++slot.unused_count;
  return std::move(record.block_);
}

}  // namespace pinion

#endif  // PINION_HOOKS_PIN_MEMORY_PINNED_BLOCK_REGISTRY_H_
