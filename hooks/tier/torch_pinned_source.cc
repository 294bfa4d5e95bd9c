#include "pinion/hooks/tier/torch_pinned_source.h"

#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/deadline.h"
#include "pinion/allocator/base/status_macros.h"

namespace pinion {
namespace {

// Throws LibTorch's error if it has no such device.
int DeviceToPinWith(c10::DeviceType type) {
  const int current = c10::impl::VirtualGuardImpl(type).getDevice().index();
  const at::AcceleratorHooksInterface* hooks = nullptr;
  try {
    hooks = &at::globalContext().getAcceleratorHooksInterface(type);
  } catch (const c10::Error&) {
    return current;  // a backend without hooks cannot tell which devices are in use
  }
  return FirstInUse(current, hooks->deviceCount(), [hooks](int index) {
    return hooks->hasPrimaryContext(static_cast<c10::DeviceIndex>(index));
  });
}

absl::StatusOr<std::shared_ptr<HostMemorySource>> SourceOf(const DeviceBackend& backend,
                                                           int index) {
  PINION_ASSIGN_OR_RETURN(const std::shared_ptr<Device> device, backend.Open(index));
  std::shared_ptr<HostMemorySource> source = device->pinned_source();
  if (source != nullptr) return source;
  return absl::InvalidArgumentError(
      absl::StrCat(device->name(), " has no pinned_source(): a device of a backend needs one"));
}

}  // namespace

int FirstInUse(int current, int device_count, const std::function<bool(int)>& in_use) {
  TORCH_CHECK(in_use != nullptr,
              "FirstInUse: in_use is null: pass a function that tells which "
              "devices have a context");
  if (in_use(current)) return current;
  for (int index = 0; index < device_count; ++index) {
    if (in_use(index)) return index;
  }
  return current;
}

absl::StatusOr<std::shared_ptr<TorchPinnedSource>> TorchPinnedSource::Create(DeviceBackend backend,
                                                                             c10::DeviceType type) {
  PINION_ASSIGN_OR_RETURN(std::shared_ptr<HostMemorySource> first, SourceOf(backend, 0));
  return std::shared_ptr<TorchPinnedSource>(
      new TorchPinnedSource(std::move(backend), type, std::move(first)));
}

TorchPinnedSource::TorchPinnedSource(DeviceBackend backend, c10::DeviceType type,
                                     std::shared_ptr<HostMemorySource> first)
    : backend_(std::move(backend)), type_(type), first_(std::move(first)) {
  by_device_[0] = first_;
}

absl::StatusOr<std::shared_ptr<HostMemorySource>> TorchPinnedSource::SourceToPinWith() {
  int index = 0;
  try {
    index = DeviceToPinWith(type_);
  } catch (const std::exception& error) {
    return absl::FailedPreconditionError(
        absl::StrCat("LibTorch has no device to pin with: ", error.what()));
  }
  {
    const MutexLock lock(mu_);
    if (const auto found = by_device_.find(index); found != by_device_.end()) return found->second;
  }
  PINION_ASSIGN_OR_RETURN(std::shared_ptr<HostMemorySource> source, SourceOf(backend_, index));
  const MutexLock lock(mu_);
  return by_device_.try_emplace(index, std::move(source)).first->second;
}

absl::StatusOr<HostSegment> TorchPinnedSource::Allocate(uint64_t size_bytes) {
  PINION_ASSIGN_OR_RETURN(const std::shared_ptr<HostMemorySource> source, SourceToPinWith());
  const internal::Stopwatch stopwatch;
  PINION_ASSIGN_OR_RETURN(const HostSegment segment, source->Allocate(size_bytes));
  if (!source->pinned()) all_is_pinned_.store(false, std::memory_order_relaxed);
  const int64_t microseconds = absl::ToInt64Microseconds(stopwatch.Elapsed());
  const MutexLock lock(mu_);
  by_segment_[segment.data] = source;
  stats_.allocations.increase(1);
  stats_.allocated_bytes.increase(segment.size_bytes);
  stats_.host_alloc_time.increase(microseconds);
  // LibTorch's bucket k holds sizes above 2^(k-1), up to 2^k.
  ++stats_.bucket_allocation[std::bit_width(size_bytes - 1)];
  return segment;
}

absl::Status TorchPinnedSource::Free(const HostSegment& segment) {
  std::map<void*, std::shared_ptr<HostMemorySource>>::node_type node;
  {
    // Before the call, behind which another thread may get a segment at this address.
    const MutexLock lock(mu_);
    node = by_segment_.extract(segment.data);
  }
  if (node.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("0x", absl::Hex(reinterpret_cast<uintptr_t>(segment.data)),
                     " is no segment of this source in use; pass each segment that its Allocate "
                     "returned, unchanged and once"));
  }
  const internal::Stopwatch stopwatch;
  absl::Status freed = node.mapped()->Free(segment);
  const int64_t microseconds = absl::ToInt64Microseconds(stopwatch.Elapsed());
  const MutexLock lock(mu_);
  if (!freed.ok()) {
    by_segment_.insert(std::move(node));  // a repeated Free finds it
    return freed;
  }
  stats_.allocations.decrease(1);
  stats_.allocated_bytes.decrease(segment.size_bytes);
  stats_.host_free_time.increase(microseconds);
  return absl::OkStatus();
}

at::HostStats TorchPinnedSource::GetStats() const {
  const MutexLock lock(mu_);
  at::HostStats stats = stats_;
  stats.num_host_alloc = stats.allocations.allocated;
  stats.num_host_free = stats.allocations.freed;
  return stats;
}

void TorchPinnedSource::ResetAccumulatedStats() {
  const MutexLock lock(mu_);
  stats_.allocations.reset_accumulated();
  stats_.allocated_bytes.reset_accumulated();
  stats_.host_alloc_time.reset_accumulated();
  stats_.host_free_time.reset_accumulated();
  std::fill(stats_.bucket_allocation.begin(), stats_.bucket_allocation.end(), 0);
}

void TorchPinnedSource::ResetPeakStats() {
  const MutexLock lock(mu_);
  stats_.allocations.reset_peak();
  stats_.allocated_bytes.reset_peak();
  stats_.host_alloc_time.reset_peak();
  stats_.host_free_time.reset_peak();
}

}  // namespace pinion
