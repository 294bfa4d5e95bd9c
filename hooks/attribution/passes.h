// Shared parts of methods that run several passes. PassRun keeps the passes within a budget for
// device memory and adds up their results. PathInputs makes their inputs along a path.
//
//   const PathInputs path(inputs, options.baselines, options.additional_inputs);
//   const PassGrid grid = {.examples = path.examples(), .steps = 50};
//   PassRun run(session, forward, layers, target, grid, /*device_budget_bytes=*/4 * kGiB, {});
//   return run.Sum([&](const PassRows& rows) {
//     return run.Gradients(rows, path.Between(rows, alphas), callbacks);
//   });
//
// Thread safety: none.
// Errors: c10::Error if inputs, baselines, rows and layers do not fit each other.

#ifndef PINION_HOOKS_ATTRIBUTION_PASSES_H_
#define PINION_HOOKS_ATTRIBUTION_PASSES_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "pinion/hooks/attribution/attribution_session.h"
#include "pinion/hooks/attribution/layer_methods.h"
#include "pinion/hooks/attribution/layer_options.h"
#include "pinion/hooks/attribution/layer_pass.h"
#include "pinion/hooks/attribution/target.h"

namespace pinion {

// -------------------------------------------------------------------------------------------- rows

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

// ------------------------------------------------------------------------------------------ inputs

// Returns baseline + alpha * difference for each alpha, concatenated on dimension 0.
at::Tensor PointsBetween(const at::Tensor& baseline, const at::Tensor& difference,
                         absl::Span<const double> alphas);

// Throws c10::Error unless there is an input, and all tensors have as many examples as the first.
void CheckInputs(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& additional);

// Builds the inputs of a forward function along the path from baselines to inputs, pass by pass.
// All examples of a step are together.
class PathInputs {
 public:
  // Empty baselines mean zeros. One for all examples has no dimensions, or a first dimension of 1.
  PathInputs(std::vector<at::Tensor> inputs, std::vector<at::Tensor> baselines,
             std::vector<at::Tensor> additional);

  int64_t examples() const { return inputs_.front().size(0); }
  size_t size() const { return inputs_.size(); }

  // Returns the inputs at the steps of `rows`, then the additional inputs. `alphas` has all steps.
  std::vector<at::Tensor> Between(const PassRows& rows, absl::Span<const double> alphas) const;
  // Return the same with every step at the inputs, or at the baselines.
  std::vector<at::Tensor> AtInputs(const PassRows& rows) const { return Repeated(inputs_, rows); }
  std::vector<at::Tensor> AtBaselines(const PassRows& rows) const {
    return Repeated(baselines_, rows);
  }

  // Appends copies of the additional inputs, which a forward function may change in place.
  void AppendAdditional(const PassRows& rows, std::vector<at::Tensor>& to) const;

  // Returns input minus baseline for the examples of `rows`. Call it under at::NoGradGuard.
  at::Tensor Difference(const PassRows& rows, size_t input) const;

 private:
  std::vector<at::Tensor> Repeated(const std::vector<at::Tensor>& of, const PassRows& rows) const;

  std::vector<at::Tensor> inputs_;
  std::vector<at::Tensor> baselines_;
  std::vector<at::Tensor> additional_;
};

// -------------------------------------------------------------------------------------------- sums

// Returns the sum of a tensor over a pass's steps, with a weight per step, in float32 or wider.
at::Tensor SumOverSteps(const at::Tensor& tensor, const PassRows& rows,
                        absl::Span<const double> weights);

// Returns the view of one step's rows in a layer's tensor. c10::Error if the first dimension is no
// multiple of the pass's rows.
at::Tensor StepOf(const at::Tensor& tensor, int64_t step, const PassRows& rows);

// Returns the sum, over a pass's steps, of terms of several tensors of one shape, in float32 at
// least. The host computes block by block, each block at all steps, so that each byte is read from
// memory once. `add` gets a one-dimensional block of the sum, and the same block of each tensor as
// [steps, elements].
at::Tensor SumTermsOverSteps(
    const std::vector<at::Tensor>& tensors, const PassRows& rows,
    const std::function<void(at::Tensor& sum, const std::vector<at::Tensor>& blocks)>& add);

// -------------------------------------------------------------------------------------------- runs

class PassBudget;

// Runs the passes of a method, and sums the layers' tensors over them: on the host or, with
// keep_on_device, on the device. Each group of examples has its own sum.
class PassRun {
 public:
  // `device_budget_bytes` bounds the allocated bytes of each device of the session's type. 0 means
  // no bound. Throws c10::Error if the target does not have the grid's examples. With a bound, also
  // throws if the allocator does not report allocated bytes, or if results would stay on the
  // device.
  PassRun(AttributionSession& session, const AttributedForward& forward,
          std::vector<std::string> layers, const Target& target, const PassGrid& grid,
          uint64_t device_budget_bytes, const LayerOptions& options);

  ~PassRun();

  // Calls `pass` for rows that cover the grid, and returns the sums: examples in order, and steps
  // in order for each group of examples, which begins at first_step 0. Passes finish in the same
  // order. Each pass is queued before the results of the one before are awaited, so the device
  // computes while the host receives and sums them.
  //
  // Throws c10::OutOfMemoryError, which names the least budget, if the smallest pass does not fit;
  // c10::Error if no device memory was observed.
  std::vector<LayerAttribution> Sum(const std::function<QueuedPass(const PassRows&)>& pass);

  // Queues forward and backward. Gradients are added to the sums when the pass finishes, unless
  // `callbacks` has an on_arrival of its own. Values arrive too if `with_values`.
  QueuedPass Gradients(const PassRows& rows, const std::vector<at::Tensor>& inputs,
                       LayerCallbacks callbacks, bool with_values = false);
  // Queues forward for the layers' values.
  PendingLayers Values(const std::vector<at::Tensor>& inputs, bool keep_on_device = false);

  // Adds to the sums. `tensor` has memory of its own, and is of the examples of `rows`.
  void Add(LayerPart part, const PassRows& rows, at::Tensor tensor);

 private:
  struct Groups {
    int64_t first_example = -1;         // of the last group
    std::vector<at::Tensor> sums = {};  // one per group of examples
  };

  const AttributionSession& session_;
  const AttributedForward& forward_;
  const std::vector<std::string> names_;
  const Target& target_;
  const PassGrid grid_;
  const std::unique_ptr<PassBudget> budget_;
  const LayerOptions options_;
  const std::shared_ptr<HostCopies> copies_;
  std::map<size_t, std::map<size_t, Groups>> groups_;  // by layer and tensor
  std::vector<LayerAttribution> layers_;               // without tensors
};

}  // namespace pinion

#endif  // PINION_HOOKS_ATTRIBUTION_PASSES_H_
