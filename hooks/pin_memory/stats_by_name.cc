#include "pinion/hooks/pin_memory/stats_by_name.h"

namespace pinion {

std::map<std::string, int64_t> StatsByName(const at::HostStats& stats) {
  std::map<std::string, int64_t> result;
  const auto set = [&result](const std::string& name, const c10::CachingAllocator::Stat& stat) {
    result[name + ".current"] = stat.current;
    result[name + ".peak"] = stat.peak;
    result[name + ".allocated"] = stat.allocated;
    result[name + ".freed"] = stat.freed;
  };
  const auto set_times = [&result](const std::string& name,
                                   const c10::CachingAllocator::DurationStat& stat) {
    result[name + ".total"] = stat.total;
    result[name + ".max"] = stat.max;
    result[name + ".min"] = stat.min;
    result[name + ".count"] = stat.count;
    result[name + ".avg"] = stat.count == 0 ? 0 : stat.total / stat.count;
  };
  set("active_requests", stats.active_requests);
  set("active_bytes", stats.active_bytes);
  set("allocations", stats.allocations);
  set("allocated_bytes", stats.allocated_bytes);
  set_times("host_alloc_time", stats.host_alloc_time);
  set_times("host_free_time", stats.host_free_time);
  result["num_host_alloc"] = stats.num_host_alloc;
  result["num_host_free"] = stats.num_host_free;
  return result;
}

}  // namespace pinion
