// Returns LibTorch's statistics of pinned memory under the names of torch.cuda.host_memory_stats():
// "allocated_bytes.current", "host_alloc_time.max" (microseconds), "num_host_alloc".

#ifndef PINION_HOOKS_PIN_MEMORY_STATS_BY_NAME_H_
#define PINION_HOOKS_PIN_MEMORY_STATS_BY_NAME_H_

#include <ATen/core/CachingHostAllocator.h>

#include <cstdint>
#include <map>
#include <string>

namespace pinion {

std::map<std::string, int64_t> StatsByName(const at::HostStats& stats);

}  // namespace pinion

#endif  // PINION_HOOKS_PIN_MEMORY_STATS_BY_NAME_H_
