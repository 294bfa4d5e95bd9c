// Pinned host memory like that of torch.empty(pin_memory=True), on any device: LibTorch's caching
// host allocator over the device's pinning allocator.
//
//   PinnedCache cache(device);
//   at::Tensor host = cache.Empty({1024}, at::kFloat);
//   host.copy_(tensor, /*non_blocking=*/true);
//   cache.UsedOn(comm_stream, host);
//
// CUDA's allocator already is that cache. The emulated device's allocator pins at each call.
//
// Thread safety: thread-safe.
// Ownership: tensors may outlive the cache. The last one of both waits for the
// device and unpins.

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

  // Returns an uninitialised contiguous tensor. Throws the errors of the device's allocator.
  at::Tensor Empty(at::IntArrayRef sizes, c10::ScalarType type);

  // Delays reuse of `tensor`, which Empty made, until work on `stream` at its destruction is done.
  void UsedOn(const c10::Stream& stream, const at::Tensor& tensor);

  // Returns the number of pinned blocks.
  int64_t pinned_blocks() const;

 private:
  class Impl;
  const std::shared_ptr<Impl> impl_;
};

}  // namespace pinion

#endif  // PINION_BENCH_PEERS_PINNED_CACHE_H_
