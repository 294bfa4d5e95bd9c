// PyTorch's host cache as a peer.

#include <utility>

#include "pinion/bench/allocator/peers.h"
#include "pinion/bench/allocator/pytorch_cache.h"

namespace pinion {

class PyTorchPeer::Impl {
 public:
  explicit Impl(std::shared_ptr<CopyClock> clock) : cache(std::move(clock)) {}
  PyTorchCache cache;
};

PyTorchPeer::PyTorchPeer(std::shared_ptr<CopyClock> clock)
    : impl_(std::make_unique<Impl>(std::move(clock))) {}

PyTorchPeer::~PyTorchPeer() = default;

PlainBlock PyTorchPeer::Allocate(uint64_t size_bytes) {
  const auto [data, context] = impl_->cache.allocate(size_bytes);
  return {data, size_bytes, context};
}

void PyTorchPeer::Free(Block block) { impl_->cache.free(block.context); }

void PyTorchPeer::FreeAfter(Block block, uint64_t number) {
  current_copy = number;
  impl_->cache.record_event(block.data, block.context, TheStream());
  impl_->cache.free(block.context);
}

uint64_t PyTorchPeer::booked_bytes(const Block& block) const {
  return static_cast<const at::HostBlock<c10::Stream>*>(block.context)->size_;
}

uint64_t PyTorchPeer::locked_bytes() const { return impl_->cache.locked_bytes(); }

}  // namespace pinion
