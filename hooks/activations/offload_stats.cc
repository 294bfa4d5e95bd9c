#include "pinion/hooks/activations/offload_stats.h"

#include "absl/strings/str_format.h"
#include "pinion/allocator/base/bytes.h"

namespace pinion {

uint64_t OffloadStats::kept() const {
  return kept_small + kept_parameter + kept_head + kept_held + kept_no_host_memory +
         kept_in_backward + kept_scope_ended + kept_capturing + kept_copy_failed +
         kept_unsupported + kept_as_planned;
}

std::string OffloadStats::ToString() const {
  return absl::StrFormat(
      "saved tensors: %d packed = %d offloaded (%s, %d of them in %d groups) + %d cast again + %d "
      "shared + "
      "%d kept (small %d, parameter %d, head %d, "
      "held %d, no host memory %d, in backward %d, scope ended %d, capturing %d, copy failed %d, "
      "unsupported %d, as planned %d)\n"
      "evicted %s, %d not freed; steps over the memory target %d, by %s at most; unpacked %d = %d "
      "still on the device + %d prefetched + %d fetched "
      "on demand + %d cast again + repeats; fetched %s; prefetches dropped %d, refused %d; "
      "verified %d; %d handles "
      "alive\n",
      packed, offloaded, HumanBytes(offloaded_bytes), grouped, groups, cast_again, shared, kept(),
      kept_small, kept_parameter, kept_head, kept_held, kept_no_host_memory, kept_in_backward,
      kept_scope_ended, kept_capturing, kept_copy_failed, kept_unsupported, kept_as_planned,
      HumanBytes(evicted_bytes), evicted_not_freed, steps_over_target,
      HumanBytes(most_bytes_over_target), unpacked, reused_on_device, prefetch_hits,
      fetched_on_demand, recast, HumanBytes(fetched_bytes), prefetches_dropped, prefetches_refused,
      verified, live_handles);
}

}  // namespace pinion
