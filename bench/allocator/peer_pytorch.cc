// PyTorch's host cache, with a stream and an event that need no device.

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <optional>
#include <utility>
#include <vector>

#include "pinion/bench/allocator/peers.h"

namespace pinion {
namespace {

struct CopyEvent {
  uint64_t number = 0;
};

c10::Stream TheStream() {
  return c10::Stream(c10::Stream::DEFAULT, c10::Device(c10::DeviceType::CPU));
}

// The copy that the calling thread's next event stands for.
thread_local uint64_t current_copy = 0;

}  // namespace

class PyTorchPeer::Impl final : public at::CachingHostAllocatorImpl<c10::Stream, CopyEvent> {
 public:
  explicit Impl(std::shared_ptr<CopyClock> clock) : clock_(std::move(clock)) {}
  ~Impl() override { empty_cache(); }

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

PyTorchPeer::PyTorchPeer(std::shared_ptr<CopyClock> clock)
    : impl_(std::make_unique<Impl>(std::move(clock))) {}

PyTorchPeer::~PyTorchPeer() = default;

PlainBlock PyTorchPeer::Allocate(uint64_t size_bytes) {
  const auto [data, context] = impl_->allocate(size_bytes);
  return {data, size_bytes, context};
}

void PyTorchPeer::Free(Block block) { impl_->free(block.context); }

void PyTorchPeer::FreeAfter(Block block, uint64_t number) {
  current_copy = number;
  impl_->record_event(block.data, block.context, TheStream());
  impl_->free(block.context);
}

uint64_t PyTorchPeer::booked_bytes(const Block& block) const {
  return static_cast<const at::HostBlock<c10::Stream>*>(block.context)->size_;
}

uint64_t PyTorchPeer::locked_bytes() const { return impl_->locked_bytes(); }

}  // namespace pinion
