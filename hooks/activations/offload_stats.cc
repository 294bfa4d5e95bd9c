#include "pinion/hooks/activations/offload_stats.h"

#include <cstddef>
#include <cstring>
#include <utility>

#include "absl/strings/str_format.h"
#include "pinion/allocator/base/bytes.h"

namespace pinion {
namespace {

// All fields are counters except the last one, a time.
using Counters = std::array<uint64_t, sizeof(OffloadStats) / sizeof(uint64_t) - 1>;
static_assert(offsetof(OffloadStats, pack_unpack_us) == sizeof(Counters));

void Add(const OffloadStats& part, OffloadStats& sum) {
  Counters counters, sums;
  std::memcpy(&counters, &part, sizeof(counters));
  std::memcpy(&sums, &sum, sizeof(sums));
  for (size_t i = 0; i < sums.size(); ++i) sums[i] += counters[i];
  std::memcpy(static_cast<void*>(&sum), &sums, sizeof(sums));
  sum.pack_unpack_us += part.pack_unpack_us;
}

}  // namespace

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

OffloadStatsRecorder::Part* OffloadStatsRecorder::AddPart(int slot) {
  auto added = std::make_unique<Part>(/*has_owner=*/slot != kNoThreadSlot);
  MutexLock lock(mu_);
  Part* part = parts_[slot].load(std::memory_order_relaxed);
  if (part != nullptr) return part;  // another thread without a slot was first
  part = all_parts_.emplace_back(std::move(added)).get();
  parts_[slot].store(part, std::memory_order_release);
  return part;
}

// Holds all locks at once, so that no handle's release is seen without its creation. The analysis
// cannot express a set of locks.
OffloadStats OffloadStatsRecorder::Get() const ABSL_NO_THREAD_SAFETY_ANALYSIS {
  OffloadStats sum;
  MutexLock lock(mu_);
  for (const auto& part : all_parts_) part->mu.Announce();
  BiasedMutex::RunBarrier();
  for (const auto& part : all_parts_) part->mu.Lock(BiasedMutex::By::kAnnounced);
  for (const auto& part : all_parts_) Add(part->stats, sum);
  for (const auto& part : all_parts_) {
    part->mu.Unlock(BiasedMutex::By::kAnnounced);
    part->mu.Renounce();
  }
  return sum;
}

}  // namespace pinion
