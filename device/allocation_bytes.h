// What an allocation takes of a device's memory. Pure.

#ifndef PINION_DEVICE_ALLOCATION_BYTES_H_
#define PINION_DEVICE_ALLOCATION_BYTES_H_

#include <cstdint>

namespace pinion {

// LibTorch's allocator for CUDA gives out, and counts, multiples of so many bytes (kMinBlockSize in
// c10/cuda/CUDACachingAllocator.cpp), and so does the emulated device.
inline constexpr uint64_t kAllocationGranularityBytes = 512;

// Of more than 1 MiB CUDA's allocator may give up to 1 MiB more, where a block that it has cached
// is left whole; other backends of it and roundup_power2_divisions count in their own ways.
constexpr uint64_t AllocationBytes(uint64_t size_bytes) {
  return (size_bytes + kAllocationGranularityBytes - 1) / kAllocationGranularityBytes *
         kAllocationGranularityBytes;
}

}  // namespace pinion

#endif  // PINION_DEVICE_ALLOCATION_BYTES_H_
