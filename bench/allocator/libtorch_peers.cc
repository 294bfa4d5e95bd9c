#include "pinion/bench/allocator/libtorch_peers.h"

#include <c10/core/DeviceType.h>

#include <algorithm>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/bench/allocator/pytorch_cache.h"
#include "pinion/bench/null_device.h"
#include "pinion/bench/null_torch_device.h"
#include "pinion/config/build_config.h"
#include "pinion/device/device_backend.h"
#include "pinion/hooks/pin_memory/torch_host_allocator.h"

namespace pinion {
namespace {

at::HostAllocator* InstalledPinion() {
  static at::HostAllocator* const allocator = [] {
    RegisterNullTorchDevice();
    AllocatorOptions options;
    // The same limits as PinionPeer's.
    options.warn_percent = options.high_percent = options.low_percent = 100;
    options.segment_bytes = std::min(config::kChunkBytes, 64 * kMiB);
    const auto device = std::make_shared<NullDevice>(NullDevice::Events::kDone);
    const absl::Status installed = InstallTorchHostAllocator(
        options, {kNullTorchDevice,
                  [device](int) -> absl::StatusOr<std::shared_ptr<Device>> { return device; }});
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

PinionInLibTorchPeer::PinionInLibTorchPeer(std::shared_ptr<CopyClock>)
    : LibTorchPeer(InstalledPinion()) {}

LibTorchCachePeer::LibTorchCachePeer(std::shared_ptr<CopyClock>) : LibTorchPeer(&TheCache()) {}

}  // namespace pinion
