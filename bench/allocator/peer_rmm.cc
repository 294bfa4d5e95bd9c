// RMM's pool over host memory, without a driver. The functions of the CUDA runtime that librmm
// calls for events are defined below. The program's own definitions precede those of the shared
// runtime.

#include <cuda_runtime_api.h>

#include <rmm/mr/pool_memory_resource.hpp>

#include "pinion/bench/allocator/peers.h"

extern "C" {

cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  *id = reinterpret_cast<unsigned long long>(stream);
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
  static char events[1 << 20];  // one address per event
  static std::atomic<size_t> made{0};
  *event = reinterpret_cast<cudaEvent_t>(&events[made++ % sizeof(events)]);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned int) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "an error of the stand-in runtime"; }
const char* cudaGetErrorString(cudaError_t) { return "an error of the stand-in runtime"; }

}  // extern "C"

namespace pinion {
namespace {

class Upstream {
 public:
  explicit Upstream(HostUpstream* upstream) : upstream_(upstream) {}

  void* allocate(cuda::stream_ref, size_t size_bytes, size_t) {
    return upstream_->Allocate(size_bytes);
  }
  void deallocate(cuda::stream_ref, void* data, size_t size_bytes, size_t) noexcept {
    upstream_->Free(data, size_bytes);
  }
  void* allocate_sync(size_t size_bytes, size_t) { return upstream_->Allocate(size_bytes); }
  void deallocate_sync(void* data, size_t size_bytes, size_t) noexcept {
    upstream_->Free(data, size_bytes);
  }
  friend bool operator==(const Upstream&, const Upstream&) = default;
  friend void get_property(const Upstream&, cuda::mr::device_accessible) noexcept {}
  friend void get_property(const Upstream&, cuda::mr::host_accessible) noexcept {}

 private:
  HostUpstream* upstream_;
};

constexpr size_t kInitialBytes = size_t{64} << 20;
constexpr size_t kAlignment = 256;

cuda::stream_ref ComputeStream() {
  return cuda::stream_ref(reinterpret_cast<cudaStream_t>(uintptr_t{0x1000}));
}
cuda::stream_ref CopyStream() {
  return cuda::stream_ref(reinterpret_cast<cudaStream_t>(uintptr_t{0x2000}));
}

}  // namespace

class RmmPeer::Impl {
 public:
  HostUpstream upstream;
  rmm::mr::pool_memory_resource pool{Upstream(&upstream), kInitialBytes};
};

RmmPeer::RmmPeer(std::shared_ptr<CopyClock>) : impl_(std::make_unique<Impl>()) {}

RmmPeer::~RmmPeer() = default;

PlainBlock RmmPeer::Allocate(uint64_t size_bytes) {
  return {impl_->pool.allocate(ComputeStream(), size_bytes, kAlignment), size_bytes};
}

void RmmPeer::Free(Block block) {
  impl_->pool.deallocate(ComputeStream(), block.data, block.size_bytes, kAlignment);
}

void RmmPeer::FreeAfter(Block block, uint64_t) {
  impl_->pool.deallocate(CopyStream(), block.data, block.size_bytes, kAlignment);
}

uint64_t RmmPeer::booked_bytes(const Block& block) const {
  return (block.size_bytes + kAlignment - 1) / kAlignment * kAlignment;
}

uint64_t RmmPeer::locked_bytes() const { return impl_->upstream.bytes(); }

}  // namespace pinion
