// Allocates the segments behind LibTorch's pinned memory, and counts them in LibTorch's HostStats.
//
// Pinning through a device opens a context on it, which takes hundreds of MB of device memory. A
// process that works on cuda:3 must not open one on cuda:0. Each segment is therefore pinned
// through the device of FirstInUse(). All devices of the type can use the memory.
//
// Thread safety: thread-safe.

#ifndef PINION_HOOKS_TIER_TORCH_PINNED_SOURCE_H_
#define PINION_HOOKS_TIER_TORCH_PINNED_SOURCE_H_

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/DeviceType.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/device/device_backend.h"

namespace pinion {

// Returns `current` if this process has a context on it, else the first device with a context, else
// `current`.
int FirstInUse(int current, int device_count, const std::function<bool(int)>& in_use);

class TorchPinnedSource final : public HostMemorySource {
 public:
  // Returns the backend's error if it has no device.
  static absl::StatusOr<std::shared_ptr<TorchPinnedSource>> Create(DeviceBackend backend,
                                                                   c10::DeviceType type);

  std::string name() const override { return first_->name(); }
  // True until any device has allocated a segment that is not page-locked.
  bool pinned() const override {
    return first_->pinned() && all_is_pinned_.load(std::memory_order_relaxed);
  }
  uint64_t granularity_bytes() const override { return first_->granularity_bytes(); }
  absl::StatusOr<HostSegment> Allocate(uint64_t size_bytes) override;
  absl::Status Free(const HostSegment& segment) override;

  // Returns the fields about segments: allocations, allocated_bytes, the times (microseconds),
  // num_host_alloc, num_host_free and bucket_allocation. The others are zero.
  at::HostStats GetStats() const;
  void ResetAccumulatedStats();
  void ResetPeakStats();

 private:
  TorchPinnedSource(DeviceBackend backend, c10::DeviceType type,
                    std::shared_ptr<HostMemorySource> first);

  absl::StatusOr<std::shared_ptr<HostMemorySource>> SourceToPinWith();

  const DeviceBackend backend_;
  const c10::DeviceType type_;
  const std::shared_ptr<HostMemorySource> first_;  // of device 0
  std::atomic<bool> all_is_pinned_ = true;         // all segments that were allocated

  mutable Mutex mu_;
  std::map<int, std::shared_ptr<HostMemorySource>> by_device_ ABSL_GUARDED_BY(mu_);
  std::map<void*, std::shared_ptr<HostMemorySource>> by_segment_ ABSL_GUARDED_BY(mu_);
  at::HostStats stats_ ABSL_GUARDED_BY(mu_);
};

}  // namespace pinion

#endif  // PINION_HOOKS_TIER_TORCH_PINNED_SOURCE_H_
