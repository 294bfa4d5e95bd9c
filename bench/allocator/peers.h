// The allocators that allocator_bench compares. Each is a class with these functions, resolved at
// compile time so that calls have no indirection:
//
//   struct Peer {
//     using Block = ...;                       // movable; what Allocate gives and Free takes
//     static constexpr const char* kName;
//     Block Allocate(uint64_t size_bytes);     // aborts when memory is short
//     void Free(Block block);
//     // Free, but reusable only once the copies up to `number` are done (CopyClock).
//     void FreeAfter(Block block, uint64_t number);
//     uint64_t booked_bytes(const Block& block) const;  // taken from the pool by the block
//     uint64_t locked_bytes() const;           // held from the upstream; 0: unknown
//   };
//
// All peers except malloc and mimalloc get memory from HostUpstream, which replaces cudaHostAlloc.
// Nothing touches the memory.
//
// Thread safety: as the allocators promise: all functions from any thread.

#ifndef PINION_BENCH_ALLOCATOR_PEERS_H_
#define PINION_BENCH_ALLOCATOR_PEERS_H_

#include <malloc.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/fence.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/allocator/pinned_block.h"

namespace pinion {

// The progress of a copy stream, without a device: copy `number` completes when `lag` later copies
// were submitted. A device's events and tickets would cost every peer more.
class CopyClock final : public FenceTimeline {
 public:
  explicit CopyClock(uint64_t lag) : lag_(lag) {}

  uint64_t Submit() {
    const uint64_t number = submitted_.fetch_add(1, std::memory_order_relaxed) + 1;
    if (number > lag_) completed_.store(number - lag_, std::memory_order_release);
    return number;
  }
  void FinishAll() { completed_.store(submitted_.load(), std::memory_order_release); }

  uint64_t Completed() const noexcept override {
    return completed_.load(std::memory_order_acquire);
  }
  void Poll() override {}
  absl::Status Wait(uint64_t, absl::Duration) override { return absl::OkStatus(); }

 private:
  const uint64_t lag_;
  std::atomic<uint64_t> submitted_{0};
  std::atomic<uint64_t> completed_{0};
};

// Aligned host memory, with the number of bytes allocated.
class HostUpstream {
 public:
  static constexpr size_t kAlignment = size_t{2} << 20;

  void* Allocate(size_t size_bytes, size_t alignment = kAlignment);
  void Free(void* data, size_t size_bytes);
  uint64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }
  uint64_t calls() const { return calls_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> bytes_{0};
  std::atomic<uint64_t> calls_{0};
};

class PinionPeer {
 public:
  using Block = PinnedBlock;
  static constexpr const char* kName = "Pinion";

  explicit PinionPeer(std::shared_ptr<CopyClock> clock);
  Block Allocate(uint64_t size_bytes) { return allocator_->Allocate(size_bytes).value(); }
  void Free(Block block) {}
  void FreeAfter(Block block, uint64_t number) {
    std::move(block).ReleaseAfter({FenceTicket{clock_, number}});
  }
  uint64_t booked_bytes(const Block& block) const { return block.capacity_bytes(); }
  uint64_t locked_bytes() const { return upstream_->bytes(); }

 private:
  const std::shared_ptr<CopyClock> clock_;
  const std::shared_ptr<HostUpstream> upstream_ = std::make_shared<HostUpstream>();
  std::shared_ptr<PinnedAllocator> allocator_;
};

// A block that is known by its address and size.
struct PlainBlock {
  void* data = nullptr;
  uint64_t size_bytes = 0;
  void* context = nullptr;
};

// PyTorch's CachingHostAllocatorImpl, the template behind pin_memory(), on host memory.
class PyTorchPeer {
 public:
  using Block = PlainBlock;
  static constexpr const char* kName = "PyTorch";

  explicit PyTorchPeer(std::shared_ptr<CopyClock> clock);
  ~PyTorchPeer();
  Block Allocate(uint64_t size_bytes);
  void Free(Block block);
  void FreeAfter(Block block, uint64_t number);  // record_event, then free
  uint64_t booked_bytes(const Block& block) const;
  uint64_t locked_bytes() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// RMM's pool_memory_resource (librmm itself) over host memory. Its blocks belong to streams: one
// that is freed on another stream than the one that asks next is handed over with an event.
class RmmPeer {
 public:
  using Block = PlainBlock;
  static constexpr const char* kName = "RMM pool";

  explicit RmmPeer(std::shared_ptr<CopyClock> clock);
  ~RmmPeer();
  Block Allocate(uint64_t size_bytes);
  void Free(Block block);
  void FreeAfter(Block block, uint64_t number);  // deallocate on the copy stream
  uint64_t booked_bytes(const Block& block) const;
  uint64_t locked_bytes() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// The textbook allocator: free chunks in a multimap by size, best fit, immediate coalescing, one
// mutex, no tickets.
class BestFitPeer {
 public:
  using Block = PlainBlock;
  static constexpr const char* kName = "best-fit map";

  explicit BestFitPeer(std::shared_ptr<CopyClock>) {}
  ~BestFitPeer();
  Block Allocate(uint64_t size_bytes);
  void Free(Block block);
  void FreeAfter(Block block, uint64_t) { Free(block); }
  uint64_t booked_bytes(const Block& block) const { return block.size_bytes; }
  uint64_t locked_bytes() const { return upstream_.bytes(); }

 private:
  using BySize = std::multimap<uint64_t, char*>;

  void Insert(char* begin, uint64_t size_bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  HostUpstream upstream_;
  Mutex mu_;
  BySize by_size_ ABSL_GUARDED_BY(mu_);
  std::map<char*, BySize::iterator> by_address_ ABSL_GUARDED_BY(mu_);
  std::map<char*, uint64_t> segments_ ABSL_GUARDED_BY(mu_);  // chunks do not coalesce across them
};

// The lower limit of latency: general-purpose allocators without pinning or tickets. `Library` has
// their functions.
template <typename Library>
class GeneralPeer {
 public:
  using Block = PlainBlock;
  static constexpr const char* kName = Library::kName;

  explicit GeneralPeer(std::shared_ptr<CopyClock>) {}
  Block Allocate(uint64_t size_bytes) { return {Library::Allocate(size_bytes), size_bytes}; }
  void Free(Block block) { Library::Free(block.data); }
  void FreeAfter(Block block, uint64_t) { Free(block); }
  uint64_t booked_bytes(const Block& block) const { return Library::UsableSize(block.data); }
  uint64_t locked_bytes() const { return 0; }
};

struct Malloc {
  static constexpr const char* kName = "malloc";
  static void* Allocate(size_t size_bytes) { return std::malloc(size_bytes); }
  static void Free(void* data) { std::free(data); }
  static size_t UsableSize(void* data) { return malloc_usable_size(data); }
};
using MallocPeer = GeneralPeer<Malloc>;

struct Mimalloc {
  static constexpr const char* kName = "mimalloc";
  static void* Allocate(size_t size_bytes);
  static void Free(void* data);
  static size_t UsableSize(void* data);
};
using MimallocPeer = GeneralPeer<Mimalloc>;

}  // namespace pinion

#endif  // PINION_BENCH_ALLOCATOR_PEERS_H_
