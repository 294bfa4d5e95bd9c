// Pinned host memory as a program on LibTorch gets it from torch.empty(pin_memory=True), on any
// device: LibTorch's own caching host allocator, over what the device's allocator pins.
//
//   PinnedCache cache(device);
//   at::Tensor host = cache.Empty({1024}, at::kFloat);
//   host.copy_(tensor, /*non_blocking=*/true);
//   cache.UsedOn(comm_stream, host);
//
// CUDA's allocator is that cache already. The emulated device has none: each allocation would pin.
//
// Thread safety: thread-safe.
// Ownership: tensors may outlive the cache. When the last one of both goes, the host waits for the
// device, and unpins.

#ifndef PINION_BENCH_PEERS_PINNED_CACHE_H_
#define PINION_BENCH_PEERS_PINNED_CACHE_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>

namespace pinion {

class PinnedCache {
 public:
  explicit PinnedCache(c10::Device device);

  // Uninitialised and contiguous. Throws what the device's allocator throws.
  at::Tensor Empty(at::IntArrayRef sizes, c10::ScalarType type);

  // The memory of `tensor`, which Empty has made, is not handed out again before what is on
  // `stream` when the tensor goes is done.
  void UsedOn(const c10::Stream& stream, const at::Tensor& tensor);

  // How many blocks were pinned.
  int64_t pinned_blocks() const;

 private:
  class Impl;
  const std::shared_ptr<Impl> impl_;
};

}  // namespace pinion

#endif  // PINION_BENCH_PEERS_PINNED_CACHE_H_
