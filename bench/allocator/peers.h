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
// All peers get memory from HostUpstream, which replaces cudaHostAlloc.
// Nothing touches the memory.
//
// Thread safety: as the allocators promise: all functions from any thread.

#ifndef PINION_BENCH_ALLOCATOR_PEERS_H_
#define PINION_BENCH_ALLOCATOR_PEERS_H_

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
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

 private:
  std::atomic<uint64_t> bytes_{0};
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

struct CopyEvent {
  uint64_t number = 0;
};

// The only stream.
inline c10::Stream TheStream() {
  return c10::Stream(c10::Stream::DEFAULT, c10::Device(c10::DeviceType::CPU));
}

// The number of the copy that the calling thread's next event completes with.
inline thread_local uint64_t current_copy = 0;

// PyTorch's host cache, the template behind pin_memory(), on host memory, with a stream and an
// event that need no device.
class PyTorchCache final : public at::CachingHostAllocatorImpl<c10::Stream, CopyEvent> {
 public:
  explicit PyTorchCache(std::shared_ptr<CopyClock> clock = std::make_shared<CopyClock>(0))
      : clock_(std::move(clock)) {}
  ~PyTorchCache() override { empty_cache(); }

  uint64_t locked_bytes() const { return upstream_.bytes(); }

 private:
  using HostBlock = at::HostBlock<c10::Stream>;

  void allocate_host_memory(size_t size, void** ptr) override {
    *ptr = upstream_.Allocate(size, /*alignment=*/4096);
  }
  void free_block(HostBlock* block) override { upstream_.Free(block->ptr_, block->size_); }
  void record_stream(std::optional<std::vector<CopyEvent>>& events, c10::Stream) override {
    events->push_back({current_copy});
  }
  bool query_event(CopyEvent& event) override { return clock_->Completed() >= event.number; }
  bool pinned_use_background_threads() override { return false; }
  c10::Stream get_current_stream() const override { return TheStream(); }
  bool stream_is_capturing(c10::Stream) const override { return false; }

  const std::shared_ptr<CopyClock> clock_;
  HostUpstream upstream_;
};

// PyTorchCache as a peer.
class PyTorchPeer {
 public:
  using Block = PlainBlock;
  static constexpr const char* kName = "PyTorch";

  explicit PyTorchPeer(std::shared_ptr<CopyClock> clock) : cache_(std::move(clock)) {}
  Block Allocate(uint64_t size_bytes) {
    const auto [data, context] = cache_.allocate(size_bytes);
    return {data, size_bytes, context};
  }
  void Free(Block block) { cache_.free(block.context); }
  // record_event, then free.
  void FreeAfter(Block block, uint64_t number) {
    current_copy = number;
    cache_.record_event(block.data, block.context, TheStream());
    cache_.free(block.context);
  }
  uint64_t booked_bytes(const Block& block) const {
    return static_cast<const at::HostBlock<c10::Stream>*>(block.context)->size_;
  }
  uint64_t locked_bytes() const { return cache_.locked_bytes(); }

 private:
  PyTorchCache cache_;
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

// A peer behind LibTorch's host allocator interface, which pin_memory() calls: it returns a DataPtr
// and deletes it. LibTorch keeps host allocators for ever, so a process has one of each.
class LibTorchPeer {
 public:
  using Block = c10::DataPtr;

  LibTorchPeer(const LibTorchPeer&) = delete;
  LibTorchPeer& operator=(const LibTorchPeer&) = delete;

  Block Allocate(uint64_t size_bytes) { return allocator_->allocate(size_bytes); }
  void Free(Block block) {}
  // Makes the call that LibTorch makes for each non-blocking copy. `pageable` is in no block.
  void RecordEvent(void* pageable) { allocator_->record_event(pageable, pageable, TheStream()); }

 protected:
  explicit LibTorchPeer(at::HostAllocator* allocator) : allocator_(allocator) {}
  ~LibTorchPeer() { allocator_->empty_cache(); }

 private:
  at::HostAllocator* const allocator_;
};

// Pinion's allocator, installed for a device that does nothing.
class PinionInLibTorchPeer : public LibTorchPeer {
 public:
  static constexpr const char* kName = "Pinion in LibTorch";
  explicit PinionInLibTorchPeer(std::shared_ptr<CopyClock>);
};

// LibTorch's own cache.
class LibTorchCachePeer : public LibTorchPeer {
 public:
  static constexpr const char* kName = "LibTorch's cache";
  explicit LibTorchCachePeer(std::shared_ptr<CopyClock>);
};

}  // namespace pinion

#endif  // PINION_BENCH_ALLOCATOR_PEERS_H_
