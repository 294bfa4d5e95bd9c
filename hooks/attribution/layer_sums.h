// Sums layers' tensors over the passes of a method, on the host or, with keep_on_device, on the
// device. Each group of examples has its own sum; Take concatenates the groups.
//
//   LayerSums sums(session, layers);
//   ... for each pass:
//     callbacks.on_arrival = [&](LayerPart part, LayerTensor& tensor) {
//       sums.Add(part, rows, std::move(tensor.gradient));
//     };
//     sums.EndPass(session.ComputeLayerGradientsAndEval(...));
//   return sums.Take();
//
// Thread safety: none.

#ifndef PINION_HOOKS_ATTRIBUTION_LAYER_SUMS_H_
#define PINION_HOOKS_ATTRIBUTION_LAYER_SUMS_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "pinion/hooks/attribution/attribution_session.h"
#include "pinion/hooks/attribution/layer_methods.h"
#include "pinion/hooks/attribution/layer_options.h"
#include "pinion/hooks/attribution/pass_budget.h"

namespace pinion {

// Returns the sum of a tensor over a pass's steps, with a weight per step, in float32 or wider.
at::Tensor SumOverSteps(const at::Tensor& tensor, const PassRows& rows,
                        absl::Span<const double> weights);

// Returns the view of one step's rows in a layer's tensor. c10::Error if the first dimension is no
// multiple of the pass's rows.
at::Tensor StepOf(const at::Tensor& tensor, int64_t step, const PassRows& rows);

// The sum over a pass's steps of terms of several tensors that are alike, in float32 at least. The
// host computes block by block of a step's elements, each block at all steps, so that what it reads
// comes from memory once. `add` is given a block of the sum, in one dimension, and the same block
// of each tensor, with the steps in front: [steps, elements].
at::Tensor SumTermsOverSteps(
    const std::vector<at::Tensor>& tensors, const PassRows& rows,
    const std::function<void(at::Tensor& sum, const std::vector<at::Tensor>& blocks)>& add);

class LayerSums {
 public:
  LayerSums(const AttributionSession& session, std::vector<std::string> layers)
      : session_(session), names_(std::move(layers)), layers_(names_.size()) {}

  // `tensor` has memory of its own, and is of the examples of `rows`.
  void Add(LayerPart part, const PassRows& rows, at::Tensor tensor);
  // What the pass says of its layers, whose tensors have been added.
  void EndPass(const std::vector<LayerResult>& layers);

  std::vector<LayerAttribution> Take();

 private:
  struct Sum {
    int64_t first_example = -1;           // of the last group
    std::vector<at::Tensor> groups = {};  // one sum per group of examples
  };

  const AttributionSession& session_;
  const std::vector<std::string> names_;
  std::map<size_t, std::map<size_t, Sum>> sums_;  // by layer and tensor
  std::vector<LayerAttribution> layers_;          // without tensors
};

}  // namespace pinion

#endif  // PINION_HOOKS_ATTRIBUTION_LAYER_SUMS_H_
