// Traces the saves, reads and layers of GraphOffload's first step.
//
// A layer begins at the first node that uses one of its parameters. It ends at a node that uses
// another layer's parameters, or those of no layer. The graph alone tells, since a node whose input
// needs no gradient does not save its parameter.
//
// Thread safety: as GraphOffload.

#ifndef PINION_BENCH_PEERS_GRAPH_TRACER_H_
#define PINION_BENCH_PEERS_GRAPH_TRACER_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "pinion/bench/peers/graph_plan.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/plan/offload_policy.h"

namespace pinion {

// Returns the tensor that `tensor` is a view of, or `tensor`.
at::Tensor WholeOf(const at::Tensor& tensor);

class GraphTracer {
 public:
  // Takes parameters by layer, and the step's other inputs.
  GraphTracer(const std::vector<std::vector<at::Tensor>>& layers,
              const std::vector<at::Tensor>& inputs, c10::Device device);

  void Save(const at::Tensor& tensor, const GraphPlace& place);
  // Traces a read by the running node. No save follows the first read.
  void Read(int save);
  // Complete at the end of the step.
  const GraphTrace& trace() const { return trace_; }

 private:
  struct Given {
    c10::Storage storage;  // keeps its address in use
    int layer;
  };

  struct Object {
    WeakStorage storage;  // keeps its address in use
    int number;
    c10::ScalarType type;
  };

  int ObjectOf(const at::Tensor& tensor, const GraphPlace& place);
  // Finds parameters in the graph below `node`.
  void FindLayers(torch::autograd::Node* node);
  void AssignRegions();

  const c10::Device device_;
  std::map<const c10::StorageImpl*, Given> given_;
  std::map<const c10::StorageImpl*, Object> objects_;

  // Nodes are identified by NodeId here.
  std::set<uint64_t> visited_;
  std::map<uint64_t, int> layer_of_node_;  // of nodes that use parameters
  std::vector<uint64_t> maker_of_object_;
  std::vector<uint64_t> node_of_save_;
  GraphTrace trace_;
};

}  // namespace pinion

#endif  // PINION_BENCH_PEERS_GRAPH_TRACER_H_
