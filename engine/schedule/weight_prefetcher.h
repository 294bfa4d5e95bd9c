// Decides which streamed weights are on the device, and which to fetch ahead. Serves programs that
// use the same weights again and again: a model's layers, forward and backward, step by step.
//
//   WeightPrefetcher prefetcher({.sizes_bytes = {4 << 20, 4 << 20, 4 << 20},
//                                .window_bytes = 8 << 20});
//   PrefetchPlan plan = prefetcher.OnUse(0, may_evict);       // object 0 is about to be used
//   // Evict plan.evictions, then fetch plan.fetches: the used object first unless it is resident.
//
// Resident objects never exceed the window. Exception: objects in use that `may_evict` refuses. The
// window may change with each use (WindowPredictor). An object is not fetched ahead if a smaller
// window on the way to its use would evict it.
//
// The prefetcher predicts the next uses: it finds the last place in the history where the same uses
// went before, and expects what followed there. Steps and the turn from forward to backward need no
// marks. It fetches ahead in the predicted order, up to a window of objects. It evicts the object
// whose next use is the latest (Belady's rule). Without a prediction it evicts the least recently
// used one.
//
// Exception: in a loop over more objects than fit, as in inference, Belady's rule would fetch every
// object in every round. Once the same round was seen twice, some objects stay on the device,
// spread over the round, and the rest is streamed past them. Objects of one size may take turns in
// staying (LoopPlan).
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
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "pinion/engine/schedule/reservation.h"

namespace pinion {

// --- A loop: a model repeats the same pass over more weights than fit, as in inference ---

struct SizedObject {
  uint32_t object = 0;
  uint64_t size_bytes = 0;
};

// Which streamed weights stay on the device in such a loop.
struct LoopPlan {
  std::vector<uint32_t> stay;  // objects that stay on the device
  // With a limit the loop moves on: objects stay in its first round only. Later, each object is
  // evicted after its use, and fetched again when the bytes ahead, with those of the object in use,
  // are within the limit.
  uint64_t most_ahead_bytes = UINT64_MAX;

  bool moves_on() const { return most_ahead_bytes != UINT64_MAX; }
  bool operator==(const LoopPlan& other) const = default;
};

// Returns the loop that fetches the fewest bytes a round. `round` has each object once, in the
// order of use. No object stays if all fit in the window, or if two objects fill the window. A pure
// function.
LoopPlan PlanLoop(const std::vector<SizedObject>& round, uint64_t window_bytes);

// --- The prefetcher ---

// What to do at a use: evict first, then fetch in this order. Objects by number.
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

  // Begins a use. Assumes that the returned evictions and fetches are made: report a failed fetch
  // by OnEvicted. Returns no fetches if the object is resident and was also used last.
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
  // Evicts objects until `size_bytes` more fit. If that needs an object that is used within the
  // next `uses_from_now` rows, evicts none and returns false.
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

// --- The window, within a memory target ---

struct WeightUse {
  uint32_t object = 0;
  bool builds_graph = false;
  bool in_backward = false;
  uint64_t argument_bytes = 0;  // of the operator's arguments that are not streamed
};

// Device memory of everything except streamed weights.
struct OthersBytes {
  uint64_t current = 0;
  uint64_t allocated = 0;  // since the start, without subtracting frees
};

// The window of streamed weights within a memory target. Leaves the rest of the program the bytes
// that it has, and those that it will have allocated by the next use.
//
//   WindowPredictor predictor(target_bytes);
//   const WeightUse use = {.object = 3, .argument_bytes = n};
//   prefetcher.set_window_bytes(predictor.AtUse(use, others, peak_bound));
//
// The allocations until the next use are predicted from earlier uses at the same place. A place is
// an object, forward or backward, and the index of the use since forward began. Without a graph,
// where forward may have no end, the index counts consecutive uses instead. The prediction is the
// most that was allocated after this place before, without subtracting frees, because what a step
// keeps may change. At a new place, or with larger arguments than before, the window is 0: then the
// used object alone is resident.
//
// While a session runs a planned step, its peak bound holds for the rest of the program. The window
// is then what the target leaves beside the bound, or beside the prediction if that is smaller and
// the step moves nothing. Moved tensors need their memory when they return.
//
// Thread safety: none; its owner's lock guards it.
class WindowPredictor {
 public:
  explicit WindowPredictor(uint64_t target_bytes) : target_bytes_(target_bytes) {}

  // Returns the window from this use to the next one.
  uint64_t AtUse(const WeightUse& use, const OthersBytes& others,
                 const std::optional<PeakBound>& peak_bound);

 private:
  // The object, and the index of its use with both flags.
  using Place = std::pair<uint32_t, uint64_t>;
  struct Known {
    uint64_t argument_bytes = 0;   // the most so far
    uint64_t allocated_bytes = 0;  // the most that others allocated until the next use
  };
  struct Last {
    Place place;
    uint64_t argument_bytes = 0;
    OthersBytes others;
  };

  Place PlaceOf(const WeightUse& use);
  void NoteLast(const OthersBytes& others);

  const uint64_t target_bytes_;
  absl::flat_hash_map<Place, Known> known_;
  absl::flat_hash_map<Place, uint64_t> uses_;  // since forward began, by place without an index
  bool in_backward_ = false;                   // of the last use
  std::optional<Last> last_;
};

}  // namespace pinion

#endif  // PINION_ENGINE_SCHEDULE_WEIGHT_PREFETCHER_H_
