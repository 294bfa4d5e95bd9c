// Decides which streamed weights are on the device, and which to fetch ahead. Serves programs that
// use the same weights again and again: a model's layers, forward and backward, step by step.
//
//   WeightPrefetcher schedule({.sizes_bytes = {4 << 20, 4 << 20, 4 << 20}, .window_bytes = 8 <<
//   20}); PrefetchPlan plan = schedule.OnUse(0, may_evict);       // object 0 is about to be used
//   ... evict plan.evictions, then fetch plan.fetches: the used object first unless it is resident
//   ...
//
// Resident objects never exceed the window. Exception: objects in use that `may_evict` refuses. The
// window may change with each use (window_predictor.h). An object is not fetched ahead if a smaller
// window on the way to its use would evict it.
//
// The schedule predicts the next uses: it finds the last place in the history where the same uses
// went before, and expects what followed there. Steps and the turn from forward to backward need no
// marks. It fetches ahead in the predicted order, up to a window of objects. It evicts the object
// whose next use is the latest (Belady's rule). Without a prediction it evicts the least recently
// used one.
//
// Exception: in a loop over more objects than fit, as in inference, Belady's rule would fetch every
// object in every round. Once the same round was seen twice, some objects stay on the device,
// spread over the round, and the rest is streamed past them. Objects of one size may take turns in
// staying (loop_plan.h).
//
//   window of 4:   round  0 1 2 3 4 5 6 7 ...     stays  0       4
//                  fetched  1 2 3   5 6 7
//
// Thread safety: none; its owner's lock guards it.

#ifndef PINION_ENGINE_SCHEDULE_WEIGHT_PREFETCHER_H_
#define PINION_ENGINE_SCHEDULE_WEIGHT_PREFETCHER_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "pinion/engine/schedule/loop_plan.h"

namespace pinion {

// Objects by number.
struct PrefetchPlan {
  std::vector<uint32_t> evictions;
  std::vector<uint32_t> fetches;
};

struct PrefetchLimits {
  std::vector<uint64_t> sizes_bytes;  // of each object
  uint64_t window_bytes = 0;          // of all that are on the device
};

class WeightPrefetcher {
 public:
  explicit WeightPrefetcher(PrefetchLimits limits);

  // Applies from the next use on. The object in use is resident even if it exceeds the window.
  void set_window_bytes(uint64_t window_bytes) { window_bytes_ = window_bytes; }

  // Begins a use. The schedule takes the evictions and fetches that it returns for done: report a
  // fetch that failed by OnEvicted. Returns no fetches if the object is resident and was also used
  // last.
  PrefetchPlan OnUse(uint32_t object, absl::FunctionRef<bool(uint32_t)> may_evict);

  // Ends a use. Returns evictions of objects that exceed the window, which may include this one.
  // After its last expected use in a row, the object may make room for the next one at once, since
  // backward reads a layer's weights early in the layer's time.
  PrefetchPlan OnUsed(uint32_t object, absl::FunctionRef<bool(uint32_t)> may_evict);

  // The host has changed objects, whose owner has evicted them. Returns fetches of the objects
  // expected next. Nothing is fetched ahead of a change that is expected.
  PrefetchPlan OnChange(absl::FunctionRef<bool(uint32_t)> may_evict);

  // The object was evicted by its owner, or could not be fetched.
  void OnEvicted(uint32_t object);

  // The object is resident: another thread has fetched it.
  void OnFetched(uint32_t object);

  uint64_t resident_bytes() const { return resident_bytes_; }

 private:
  struct Object {
    uint64_t size_bytes = 0;
    uint64_t last_use = 0;
    bool is_resident = false;
    bool stays = false;
    uint64_t next_row = 0;  // the row of its next use, as expected; kNever
  };

  // Consecutive uses of one object, or a change.
  struct Row {
    uint32_t object = 0;
    uint32_t uses = 0;
    uint64_t window_bytes = 0;  // the smallest window during these uses
  };

  // The object number that stands for a change.
  uint32_t change() const { return static_cast<uint32_t>(objects_.size() - 1); }
  void FetchAhead(uint32_t in_use, absl::FunctionRef<bool(uint32_t)> may_evict, PrefetchPlan& plan);
  void Remember(uint32_t object);
  std::optional<size_t> FindSameUses() const;
  size_t period() const { return history_.size() - 1 - *match_; }
  const Row& ExpectedAt(size_t uses_from_now) const;
  void FindNextRows();
  // Drops objects until `size_bytes` more fit. Returns false, and evictions nothing, if that would
  // take an object that is used within the next `uses_from_now` rows.
  bool MakeRoom(uint64_t size_bytes, size_t uses_from_now, uint32_t in_use,
                absl::FunctionRef<bool(uint32_t)> may_evict, PrefetchPlan& plan);
  void ChooseLoop();
  void Begin(LoopPlan loop);
  void SetWhatStays(const std::vector<uint32_t>& objects);

  uint64_t window_bytes_;
  std::vector<Object> objects_;
  std::vector<Row> history_;     // neighbours have different objects
  uint64_t rows_ = 0;            // since the start, including those that history_ has dropped
  std::optional<size_t> match_;  // the row of history_ that the last one repeats
  size_t expected_uses_ = 0;     // predicted rows in succession, up to the last one
  LoopPlan loop_;
  uint64_t stay_bytes_ = 0;  // of the objects that stay
  uint64_t resident_bytes_ = 0;
  uint64_t uses_ = 0;
};

}  // namespace pinion

#endif  // PINION_ENGINE_SCHEDULE_WEIGHT_PREFETCHER_H_
