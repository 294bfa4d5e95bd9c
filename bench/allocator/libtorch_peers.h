// What pin_memory() costs: allocators behind LibTorch's interface for them, which hands out a
// DataPtr and deletes it.
//
// Both are peers as peers.h describes them, with what a trace needs. There is one of each in a
// process, for LibTorch keeps them for ever.

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
  // What LibTorch asks for each copy that does not block. `pageable` is nobody's block.
  void RecordEvent(void* pageable) { allocator_->record_event(pageable, pageable, TheStream()); }

 protected:
  explicit LibTorchPeer(at::HostAllocator* allocator) : allocator_(allocator) {}
  ~LibTorchPeer() { allocator_->empty_cache(); }

 private:
  at::HostAllocator* const allocator_;
};

// Pinion's, installed for a device that does nothing.
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
