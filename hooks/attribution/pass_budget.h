// How many rows a pass of a batched method may have within a budget for device memory: learned from
// the passes before, instead of guessed by the user.
//
//   PassBudget budget(4 * kGiB, c10::DeviceType::CUDA);
//   ForEachPass(budget, {.examples = 16, .steps = 50}, [&](const PassRows& rows) {
//     ... queues forward and backward of rows.size() rows, step by step ...
//     return QueuedPass{copies->HeldBytes(), [=] { ... waits for the results, adds them up ... }};
//   });
//
// A pass is queued before the results of the one before are waited for, so that the device computes
// while they arrive and the host adds them up.
//
// The first pass has one example at the least number of steps. What it takes beside what the
// devices held before grows at most in proportion to the rows, so each next pass is as large as the
// passes before let expect, and what does not grow with them (workspaces, gradients of parameters)
// lets it grow further. A pass has at most 8 times the rows of one that was seen, and 1/64 of the
// room is left for rounding, as is what the pass before still holds for its copies. One that takes
// more all the same is logged, and later ones are smaller.
//
// Observed is what LibTorch's allocators have given out (hooks/autograd/memory_observer.h), by this
// thread and by the backwards that it begins.
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

// All rows: `steps` of each of `examples`. Passes of one example share `overlap` steps.
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

// A pass whose work the devices have been given.
struct QueuedPass {
  uint64_t held_bytes = 0;       // of a device, that the next pass finds taken for copies
  std::function<void()> finish;  // once the next pass is queued, if there is one; may be empty
};

class PassBudget {
 public:
  // `budget_bytes` are of each device of this type, all that its allocator holds; 0: no bound.
  // c10::Error where there is a bound, and the allocator does not tell what it has given out.
  PassBudget(uint64_t budget_bytes, c10::DeviceType type);

  // c10::Error where results would stay on the device, beside a bound.
  void CheckResults(const LayerOptions& options) const;

  // Of the next pass. `left` and the results are positive.
  int64_t Examples(int64_t left) const;
  int64_t Steps(int64_t examples, int64_t left, int64_t least_steps) const;

  // Queues a pass, and learns from it. c10::OutOfMemoryError where the smallest pass that there is
  // does not fit, which names the least budget; c10::Error where nothing was seen of the devices.
  QueuedPass Queue(const PassRows& rows, const std::function<QueuedPass(const PassRows&)>& pass);

 private:
  bool has_bound() const { return budget_bytes_ > 0; }

  struct Observed {
    double rows = 0;
    double steps = 0;
    double share = 0;  // of the room, on the device where it was largest
  };

  // The most rows of a next pass, if it has as many steps of each example as the one that was
  // observed, or more: with fewer steps it would have more examples for its rows, and what each
  // example takes by itself (the ends of its path) would grow faster than the rows.
  double MostRows(const Observed& observed) const;

  const uint64_t budget_bytes_;
  const c10::DeviceType type_;
  std::vector<int64_t> held_bytes_;  // by device, when the method began
  std::vector<Observed> observed_;
  double most_rows_ = std::numeric_limits<double>::infinity();  // since a pass took too much
};

// Calls `pass` for rows that, together, are all of the grid: examples one after the other, and of
// each its steps in order. A method that keeps something for a group of examples begins when
// first_step is 0. Passes are finished in the same order.
void ForEachPass(PassBudget& budget, const PassGrid& grid,
                 const std::function<QueuedPass(const PassRows&)>& pass);

}  // namespace pinion

#endif  // PINION_HOOKS_ATTRIBUTION_PASS_BUDGET_H_
