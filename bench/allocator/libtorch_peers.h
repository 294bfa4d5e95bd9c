// Peers (peers.h) behind LibTorch's host allocator interface, which pin_memory() calls: it returns
// a DataPtr and deletes it.
//
// LibTorch keeps host allocators for ever, so a process has one of each.

#ifndef PINION_BENCH_ALLOCATOR_LIBTORCH_PEERS_H_
#define PINION_BENCH_ALLOCATOR_LIBTORCH_PEERS_H_

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>

#include <cstdint>
#include <memory>

#include "pinion/bench/allocator/peers.h"
#include "pinion/bench/allocator/pytorch_cache.h"

namespace pinion {

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

#endif  // PINION_BENCH_ALLOCATOR_LIBTORCH_PEERS_H_
