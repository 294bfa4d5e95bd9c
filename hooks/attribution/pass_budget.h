// Sizes the passes of a batched method to fit a device-memory budget, in place of a batch size that
// the user has to guess. It learns from the memory peaks of earlier passes.
//
//   PassBudget budget(4 * kGiB, c10::DeviceType::CUDA);
//   ForEachPass(budget, {.examples = 16, .steps = 50}, [&](const PassRows& rows) {
//     ... queues forward and backward of rows.size() rows, step by step ...
//     return QueuedPass{copies->HeldBytes(), [=] { ... waits for the results, adds them up ... }};
//   });
//
// Each pass is queued before the results of the one before are awaited, so the device computes
// while the host receives and sums them.
//
// The first pass has one example and the fewest steps. The memory that a pass adds grows at most in
// proportion to its rows, so the peaks bound the next pass. A pass has at most 8 times the observed
// rows and leaves 1/64 of the headroom for rounding. Memory held for the previous pass's copies
// counts. A pass that exceeds the budget is logged, and later passes are smaller.
//
// The peaks are what LibTorch's allocators report (hooks/autograd/memory_observer.h) for this
// thread and its backward passes.
//
// Thread safety: none.

#ifndef PINION_HOOKS_ATTRIBUTION_PASS_BUDGET_H_
#define PINION_HOOKS_ATTRIBUTION_PASS_BUDGET_H_

#include <c10/core/DeviceType.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "pinion/hooks/attribution/layer_options.h"

namespace pinion {

// All rows of a method: `steps` steps for each of `examples` examples. Consecutive passes over the
// same examples share `overlap` steps.
struct PassGrid {
  int64_t examples = 0;
  int64_t steps = 0;
  int64_t overlap = 0;  // less than `steps`
};

// The rows of one pass: some steps of some examples.
struct PassRows {
  int64_t first_example = 0;
  int64_t examples = 0;
  int64_t first_step = 0;
  int64_t steps = 0;

  int64_t size() const { return examples * steps; }
};

// A pass whose work has been queued on the devices.
struct QueuedPass {
  uint64_t held_bytes = 0;       // device bytes still held for copies during the next pass
  std::function<void()> finish;  // may be empty; called when the next pass, if any, is queued
};

class PassBudget {
 public:
  // Bounds all bytes that the allocator has given out on each device of this type; 0: no bound.
  // c10::Error if there is a bound and the allocator does not report allocated bytes.
  PassBudget(uint64_t budget_bytes, c10::DeviceType type);

  // Throws c10::Error if there is a bound and results would stay on the device.
  void CheckResults(const LayerOptions& options) const;

  // Return the examples and the steps of the next pass. `left` and the results are positive.
  int64_t Examples(int64_t left) const;
  int64_t Steps(int64_t examples, int64_t left, int64_t least_steps) const;

  // Queues a pass and records its peak. c10::OutOfMemoryError, which names the least budget, if the
  // smallest pass does not fit; c10::Error if no device memory was observed.
  QueuedPass Queue(const PassRows& rows, const std::function<QueuedPass(const PassRows&)>& pass);

 private:
  bool has_bound() const { return budget_bytes_ > 0; }

  struct Observed {
    double rows = 0;
    double steps = 0;
    double share = 0;  // of the headroom, on the device where it is largest
  };

  // Returns the most rows for a next pass that has at least as many steps per example as
  // `observed`. With fewer steps the same rows would have more examples, and memory per example
  // (the path's ends) would grow faster than the rows.
  double MostRows(const Observed& observed) const;

  const uint64_t budget_bytes_;
  const c10::DeviceType type_;
  std::vector<int64_t> held_bytes_;  // by device, when the method began
  std::vector<Observed> observed_;
  double most_rows_ = std::numeric_limits<double>::infinity();  // set when a pass is too large
};

// Calls `pass` for rows that cover the grid: examples in order, and steps in order for each group
// of examples, which begins at first_step 0. Passes finish in the same order.
void ForEachPass(PassBudget& budget, const PassGrid& grid,
                 const std::function<QueuedPass(const PassRows&)>& pass);

}  // namespace pinion

#endif  // PINION_HOOKS_ATTRIBUTION_PASS_BUDGET_H_
