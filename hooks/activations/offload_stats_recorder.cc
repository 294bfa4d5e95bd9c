#include "pinion/hooks/activations/offload_stats_recorder.h"

#include <cstddef>
#include <cstring>
#include <utility>

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
