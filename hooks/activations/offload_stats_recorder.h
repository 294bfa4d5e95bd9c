// Collects a session's OffloadStats from many threads.
//
//   recorder.Update([](OffloadStats& stats) { ++stats.offloaded; });
//   const OffloadStats sum = recorder.Get();
//
// Each thread counts in a part of its own. A counter's increments and decrements may be on
// different threads.
//
// Thread safety: a recorder is thread-safe; a HostTimer belongs to one thread.

#ifndef PINION_HOOKS_ACTIVATIONS_OFFLOAD_STATS_RECORDER_H_
#define PINION_HOOKS_ACTIVATIONS_OFFLOAD_STATS_RECORDER_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "pinion/allocator/base/biased_mutex.h"
#include "pinion/allocator/base/deadline.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/base/thread_slot.h"
#include "pinion/hooks/activations/offload_stats.h"

namespace pinion {

class OffloadStatsRecorder {
 public:
  // Takes milliseconds the first time in a process. Later calls may be made under a lock.
  OffloadStatsRecorder() { BiasedMutex::BestBarrier(); }

  template <typename Function>
  void Update(Function update) {
    const int slot = ThreadSlot();
    Part* part = parts_[slot].load(std::memory_order_acquire);
    if (part == nullptr) part = AddPart(slot);
    BiasedLock lock(part->mu,
                    slot == kNoThreadSlot ? BiasedMutex::By::kOther : BiasedMutex::By::kOwner);
    update(part->stats);
  }

  // Returns a consistent snapshot of all threads.
  OffloadStats Get() const;

 private:
  // Counters of one thread with a slot, or of all threads without one.
  struct alignas(64) Part {
    explicit Part(bool has_owner)
        : mu(has_owner ? BiasedMutex::BestBarrier() : BiasedMutex::Barrier::kNone) {}
    mutable BiasedMutex mu;
    OffloadStats stats ABSL_GUARDED_BY(mu);
  };

  Part* AddPart(int slot);

  std::array<std::atomic<Part*>, kThreadSlots + 1> parts_ = {};
  mutable Mutex mu_;
  std::vector<std::unique_ptr<Part>> all_parts_ ABSL_GUARDED_BY(mu_);
};

// Adds its lifetime to pack_unpack_us and increments the counter that Count() has set.
class [[nodiscard]] HostTimer {
 public:
  [[nodiscard]] explicit HostTimer(OffloadStatsRecorder& recorder) : recorder_(recorder) {}
  ~HostTimer() {
    const double elapsed_us = absl::ToDoubleMicroseconds(stopwatch_.Elapsed());
    recorder_.Update([&](OffloadStats& stats) {
      stats.pack_unpack_us += elapsed_us;
      if (counter_ != nullptr) ++(stats.*counter_);
    });
  }

  void Count(uint64_t OffloadStats::*counter) { counter_ = counter; }

 private:
  OffloadStatsRecorder& recorder_;
  uint64_t OffloadStats::*counter_ = nullptr;
  const internal::Stopwatch stopwatch_;
};

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_OFFLOAD_STATS_RECORDER_H_
