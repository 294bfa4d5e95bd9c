// The values of Bazel's flags `--//config:...`, as constants. docs/users/options.md lists them.

#ifndef PINION_CONFIG_BUILD_CONFIG_H_
#define PINION_CONFIG_BUILD_CONFIG_H_

#include <cstdint>

namespace pinion::config {

// Size classes per doubling that requests are rounded up to: at most a part of
// 1 / kBucketsPerDoubling of a request is rounding.
inline constexpr uint64_t kBucketsPerDoubling = {buckets_per_doubling};

// The smallest block, and what every block is aligned to.
inline constexpr uint64_t kMinBlockBytes = {min_block_bytes};

// The default of AllocatorOptions::segment_bytes.
inline constexpr uint64_t kChunkBytes = uint64_t{{chunk_mib}} << 20;

// Red zones behind blocks, a pattern in free memory, and the check that a BiasedMutex is not locked
// twice by its owner.
inline constexpr bool kHardened = {hardening};

}  // namespace pinion::config

#endif  // PINION_CONFIG_BUILD_CONFIG_H_
