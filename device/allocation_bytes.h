// Computes how much device memory an allocation really takes after rounding. Pure.

#ifndef PINION_DEVICE_ALLOCATION_BYTES_H_
#define PINION_DEVICE_ALLOCATION_BYTES_H_

#include <cstdint>

namespace pinion {

// Granularity of LibTorch's CUDA caching allocator (kMinBlockSize in
// c10/cuda/CUDACachingAllocator.cpp) and of the emulated device.
inline constexpr uint64_t kAllocationGranularityBytes = 512;

// Returns `size_bytes` rounded up to the granularity. For requests above 1 MiB the caching
// allocator may count up to 1 MiB more, because it leaves a cached block whole. Its other backends
// and roundup_power2_divisions round differently.
constexpr uint64_t AllocationBytes(uint64_t size_bytes) {
  return (size_bytes + kAllocationGranularityBytes - 1) / kAllocationGranularityBytes *
         kAllocationGranularityBytes;
}

}  // namespace pinion

#endif  // PINION_DEVICE_ALLOCATION_BYTES_H_
