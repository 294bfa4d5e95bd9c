// The offload pass of torchtitan's graph trainer (experiments/graph_trainer/cpu_offload.py) in
// eager mode, as a baseline for benchmarks: the largest tensors leave, whole layers lie between the
// copy out and the wait for it, and between the copy back and its use.
//
//   GraphOptions options;
//   options.layers = {parameters of layer 0, parameters of layer 1, ...};
//   options.inputs = {other parameters, the first batch};
//   const auto graph = std::make_shared<GraphOffload>(options, device);
//   for (...) {                                 // steps that do the same
//     {
//       const SavedTensorScope scope(graph);
//       loss = model->forward(x);
//     }
//     loss.backward();
//   }
//
// The pass sees a step before it runs, in a trace. Here the first step is the trace: nothing leaves
// the device in it. Each later step must save the same tensors in the same order.
//
// As there:
//   who      What a layer makes and backward reads, contiguous and of at least 4 KiB, the largest
//            first, within a budget of host memory. Saved views go as the tensor that they are
//            views of. Parameters, inputs, and what the last layer or no layer makes stay.
//   out      Copied when it is saved. `defer_n_layers` layers later the compute stream waits for
//            the copy, and the memory goes.
//   back     Copied when backward gets to the layer that is `prefetch_n_layers` before the one
//            that has made it, into memory of the compute stream. The stream waits at the first
//            use.
//   host     A pool of pinned buffers, by size and type, without a limit of its own.
//
// Different: one stream for each direction, where PyTorch's operators (ao::offload, ao::reload)
// share one. Layers are told apart by their parameters that require a gradient: nodes before the
// first use of one count as the layer's before.
//
// Errors: c10::Error in a step that is another one than the first, as far as that is noticed.
// Thread safety: one thread at a time: the one that runs forward, then the one that runs the
// device's backward.
// Ownership: graphs share ownership of what it remembers.

#ifndef PINION_BENCH_PEERS_GRAPH_OFFLOAD_H_
#define PINION_BENCH_PEERS_GRAPH_OFFLOAD_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <memory>
#include <vector>

#include "pinion/bench/peers/graph_plan.h"
#include "pinion/bench/peers/peer_stats.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"

namespace pinion {

struct GraphOptions {
  GraphLimits limits = {};
  std::vector<std::vector<at::Tensor>> layers = {};  // the parameters of each, in forward's order
  // What else a step is given: where a parameter among them is used, no layer is.
  std::vector<at::Tensor> inputs = {};
};

class GraphState;

class GraphOffload : public SavedTensorPacker {
 public:
  GraphOffload(const GraphOptions& options, c10::Device device);

  std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace& place) override;
  PeerStats GetStats() const;

 private:
  const std::shared_ptr<GraphState> state_;
};

}  // namespace pinion

#endif  // PINION_BENCH_PEERS_GRAPH_OFFLOAD_H_
