#include "pinion/bench/allocator/peers.h"

#include <c10/core/DeviceType.h>

#include <algorithm>
#include <cstdlib>
#include <string>

#include "absl/status/statusor.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/bench/null_device.h"
#include "pinion/bench/null_torch_device.h"
#include "pinion/config/build_config.h"
#include "pinion/device/device_backend.h"
#include "pinion/hooks/pin_memory/torch_host_allocator.h"
#include "pinion/programs/pool_options.h"

namespace pinion {
namespace {

AllocatorOptions PoolOptions() {
  AllocatorOptions options = PoolWithoutWatermarks();
  // The traces are of small models.
  options.segment_bytes = std::min(config::kChunkBytes, 64 * kMiB);
  return options;
}

class UpstreamSource final : public HostMemorySource {
 public:
  explicit UpstreamSource(std::shared_ptr<HostUpstream> upstream)
      : upstream_(std::move(upstream)) {}

  std::string name() const override { return "host upstream"; }
  bool pinned() const override { return true; }
  uint64_t granularity_bytes() const override { return HostUpstream::kAlignment; }
  absl::StatusOr<HostSegment> Allocate(uint64_t size_bytes) override {
    return HostSegment{upstream_->Allocate(size_bytes), size_bytes, /*numa_node=*/-1};
  }
  absl::Status Free(const HostSegment& segment) override {
    upstream_->Free(segment.data, segment.size_bytes);
    return absl::OkStatus();
  }

 private:
  const std::shared_ptr<HostUpstream> upstream_;
};

at::HostAllocator* InstalledPinion() {
  static at::HostAllocator* const allocator = [] {
    RegisterNullTorchDevice();
    const auto device = std::make_shared<NullDevice>(NullDevice::Events::kDone);
    const absl::Status installed = InstallTorchHostAllocator(
        PoolOptions(), {kNullTorchDevice, [device](int) -> absl::StatusOr<std::shared_ptr<Device>> {
                          return device;
                        }});
    PINION_CHECK(installed.ok()) << installed.message();
    return at::getHostAllocator(c10::DeviceType::PrivateUse1);
  }();
  return allocator;
}

void DeleteOfCache(void* context);

using Cache = at::CachingHostAllocatorInterface<PyTorchCache, &DeleteOfCache>;

Cache& TheCache() {
  static Cache* const cache = new Cache();
  return *cache;
}

void DeleteOfCache(void* context) { TheCache().free(context); }

}  // namespace

void* HostUpstream::Allocate(size_t size_bytes, size_t alignment) {
  void* const data = std::aligned_alloc(alignment, AlignUp(size_bytes, alignment));
  PINION_CHECK(data != nullptr) << "no host memory for " << size_bytes << " bytes";
  bytes_.fetch_add(size_bytes, std::memory_order_relaxed);
  return data;
}

void HostUpstream::Free(void* data, size_t size_bytes) {
  std::free(data);
  bytes_.fetch_sub(size_bytes, std::memory_order_relaxed);
}

PinionPeer::PinionPeer(std::shared_ptr<CopyClock> clock)
    : clock_(std::move(clock)),
      allocator_(PinnedAllocator::Create(PoolOptions(), std::make_shared<UpstreamSource>(upstream_))
                     .value()) {}

PinionInLibTorchPeer::PinionInLibTorchPeer(std::shared_ptr<CopyClock>)
    : LibTorchPeer(InstalledPinion()) {}

LibTorchCachePeer::LibTorchCachePeer(std::shared_ptr<CopyClock>) : LibTorchPeer(&TheCache()) {}

}  // namespace pinion
