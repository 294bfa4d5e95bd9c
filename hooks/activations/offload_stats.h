// What an OffloadSession did, as a value.
//
//   const OffloadStats stats = session->GetStats();
//   std::cout << stats.ToString() << stats.kept_small << " tensors were small\n";
//
// Thread safety: OffloadStats is plain data; an OffloadStatsRecorder is thread-safe.

#ifndef PINION_HOOKS_ACTIVATIONS_OFFLOAD_STATS_H_
#define PINION_HOOKS_ACTIVATIONS_OFFLOAD_STATS_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "pinion/allocator/base/biased_mutex.h"
#include "pinion/allocator/base/deadline.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/base/thread_slot.h"

namespace pinion {

// Counters since the session began. Bytes are of storages that were copied, each once per version.
struct OffloadStats {
  uint64_t packed = 0;      // saved tensors that reached a scope
  uint64_t offloaded = 0;   // of these: with a host copy of their own
  uint64_t shared = 0;      //   views and repeats of one that has a copy already
  uint64_t cast_again = 0;  //   not copied: cast once more from its parameter when it is needed
  uint64_t kept_small = 0;  //   kept on the device, by reason
  uint64_t kept_parameter = 0;
  uint64_t kept_head = 0;  //   saved by a head of the scope's module (module_heads.h)
  uint64_t kept_held = 0;  //   a leaf that someone else holds: offloading frees nothing
  uint64_t kept_no_host_memory = 0;
  uint64_t kept_in_backward = 0;  //   recomputed during backward, needed at once
  uint64_t kept_scope_ended = 0;  //   saved by a thread that has outlived the scope
  uint64_t kept_capturing = 0;
  uint64_t kept_copy_failed = 0;   //   or the device could not be set up, or is broken
  uint64_t kept_unsupported = 0;   //   not strided, not of the session's device type, ...
  uint64_t kept_as_planned = 0;    //   the memory target leaves room for it, or others go first
  uint64_t offloaded_bytes = 0;    // as the link carries them: with a group's padding
  uint64_t groups = 0;             // blocks of host memory that several small tensors share
  uint64_t grouped = 0;            //   these tensors
  uint64_t evicted_bytes = 0;      // dropped from the device once copied
  uint64_t evicted_not_freed = 0;  //   of these tensors: with another owner at that moment

  // With a memory target in bytes: steps that had more on their device than it allows, as far as
  // was seen in scopes and backwards, and how much more at the most.
  uint64_t steps_over_target = 0;
  uint64_t most_bytes_over_target = 0;

  uint64_t unpacked = 0;
  uint64_t reused_on_device = 0;  // the storage was still alive: no copy back
  uint64_t prefetch_hits = 0;     // a group counts once, here and below
  uint64_t fetched_on_demand = 0;
  uint64_t recast = 0;              // weights that were cast again, once for several readers
  uint64_t prefetches_dropped = 0;  // fetched, never read: partial backward, dead branch
  uint64_t prefetches_refused = 0;  // could not be started: no device memory, or a failed copy
  uint64_t prefetch_looks = 0;      // at tensors and groups, to choose what to fetch ahead
  uint64_t fetched_bytes = 0;
  uint64_t verified = 0;  // fetched tensors with the right checksum (OffloadOptions::verify)
  uint64_t live_handles = 0;

  double pack_unpack_us = 0;  // wall time of the host inside pack and unpack, total

  // Where each saved tensor went adds up to `packed`. Every kept one has exactly one reason.
  uint64_t kept() const;
  // Tensors were saved, and none could have been offloaded.
  bool AllElsewhere() const { return packed > 0 && kept_unsupported == packed; }

  std::string ToString() const;  // a few lines for people
};

// The same counters, written from many threads, each its own: a saved tensor is counted some ten
// times on its way. What one thread has counted up and another one down adds up.
class OffloadStatsRecorder {
 public:
  // The first call of the process takes milliseconds; later ones may be made with a lock held.
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

  // All of one moment.
  OffloadStats Get() const;

 private:
  // Of the thread that has a number, or of all that have none.
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

// Adds the wall time of its own life to the statistics, and what it was told to count, at once.
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

#endif  // PINION_HOOKS_ACTIVATIONS_OFFLOAD_STATS_H_
