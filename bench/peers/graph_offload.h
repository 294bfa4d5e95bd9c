// The offload pass of torchtitan's graph trainer (experiments/graph_trainer/cpu_offload.py) in
// eager mode, as a baseline. It offloads the largest tensors, and leaves whole layers between a
// copy and the wait for it.
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
// The pass reads a trace of the step. Here the first step is the trace and offloads nothing. Each
// later step must save the same tensors in the same order.
//
// As there:
//   who      Contiguous tensors of at least 4 KiB that a layer makes and backward reads, the
//            largest first, within a host budget. A saved view is offloaded as its base.
//            Parameters, inputs, and tensors of the last layer or of no layer stay resident.
//   out      Copied when saved. `defer_n_layers` layers later the compute stream waits for the
//            copy, and the memory is freed.
//   back     Copied when backward reaches the layer `prefetch_n_layers` before the tensor's, into
//            memory of the compute stream. The stream waits at the first use.
//   host     An unlimited pool of pinned buffers by size and type.
//
// Differences: one stream for each direction, where PyTorch's operators (ao::offload, ao::reload)
// share one. A layer begins at the first node that uses its parameters that require a gradient.
//
// Errors: c10::Error in a step that is seen to differ from the first.
// Thread safety: one thread at a time: the one that runs forward, then the one that runs the
// device's backward.
// Ownership: graphs share ownership of the state.

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
  std::vector<std::vector<at::Tensor>> layers = {};  // parameters of each, in forward's order
  // The step's other inputs. Nodes that use a parameter among them are in no layer.
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
