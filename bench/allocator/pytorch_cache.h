// PyTorch's host cache, the template behind pin_memory(), on host memory, with a stream and an
// event that need no device.
//
// Thread safety: as PyTorch's.

#ifndef PINION_BENCH_ALLOCATOR_PYTORCH_CACHE_H_
#define PINION_BENCH_ALLOCATOR_PYTORCH_CACHE_H_

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "pinion/bench/allocator/peers.h"

namespace pinion {

struct CopyEvent {
  uint64_t number = 0;
};

// The only stream.
inline c10::Stream TheStream() {
  return c10::Stream(c10::Stream::DEFAULT, c10::Device(c10::DeviceType::CPU));
}

// The number of the copy that the calling thread's next event completes with.
inline thread_local uint64_t current_copy = 0;

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

}  // namespace pinion

#endif  // PINION_BENCH_ALLOCATOR_PYTORCH_CACHE_H_
