// Where the segments behind LibTorch's pinned memory come from: the pinned source of the device
// that LibTorch would pin through, counted as LibTorch counts.
//
// Pinning through a device opens a context on it, which takes hundreds of MB of its memory: a
// process that works on cuda:3 must not open one on cuda:0. So each segment is pinned through the
// current device if that is in use by this process, else through the first one that is, else
// through the current one. All devices of the type can use the memory.
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

// `current` if this process has a context on it, else the first device that it has one on, else
// `current`.
int FirstInUse(int current, int device_count, const std::function<bool(int)>& in_use);

class TorchPinnedSource final : public HostMemorySource {
 public:
  // The backend's own error if it has no device.
  static absl::StatusOr<std::shared_ptr<TorchPinnedSource>> Create(DeviceBackend backend,
                                                                   c10::DeviceType type);

  std::string name() const override { return first_->name(); }
  // Until any device has given memory that is not locked.
  bool pinned() const override {
    return first_->pinned() && all_is_pinned_.load(std::memory_order_relaxed);
  }
  uint64_t granularity_bytes() const override { return first_->granularity_bytes(); }
  absl::StatusOr<HostSegment> Allocate(uint64_t size_bytes) override;
  absl::Status Free(const HostSegment& segment) override;

  // The fields that are about segments: allocations, allocated_bytes, the times, num_host_alloc,
  // num_host_free and bucket_allocation.
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
  std::atomic<bool> all_is_pinned_ = true;         // of what was allocated

  mutable Mutex mu_;
  std::map<int, std::shared_ptr<HostMemorySource>> by_device_ ABSL_GUARDED_BY(mu_);
  std::map<void*, std::shared_ptr<HostMemorySource>> by_segment_ ABSL_GUARDED_BY(mu_);
  at::HostStats stats_ ABSL_GUARDED_BY(mu_);
};

}  // namespace pinion

#endif  // PINION_HOOKS_TIER_TORCH_PINNED_SOURCE_H_
