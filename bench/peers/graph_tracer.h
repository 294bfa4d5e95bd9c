// Notes what the first step of GraphOffload saves and reads, and which layer does it.
//
// A layer begins with the first node that uses one of its parameters, and ends where another one's,
// or those of no layer, are used. Only the graph tells: a node that needs no gradient of its input
// does not save its parameter.
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

// The tensor that `tensor` is a view of; itself if it is none.
at::Tensor WholeOf(const at::Tensor& tensor);

class GraphTracer {
 public:
  // Parameters by layer, and what else the step is given.
  GraphTracer(const std::vector<std::vector<at::Tensor>>& layers,
              const std::vector<at::Tensor>& inputs, c10::Device device);

  void Save(const at::Tensor& tensor, const GraphPlace& place);
  // By the node that runs. Nothing is saved after the first one.
  void Read(int save);
  // Complete when the step has ended.
  const GraphTrace& trace() const { return trace_; }

 private:
  struct Given {
    c10::Storage storage;  // which keeps its address
    int layer;
  };

  struct Object {
    WeakStorage storage;  // which keeps its address
    int number;
    c10::ScalarType type;
  };

  int ObjectOf(const at::Tensor& tensor, const GraphPlace& place);
  // Looks for parameters in the graph below `node`.
  void FindLayers(torch::autograd::Node* node);
  void AssignRegions();

  const c10::Device device_;
  std::map<const c10::StorageImpl*, Given> given_;
  std::map<const c10::StorageImpl*, Object> objects_;

  // Nodes go by the numbers of NodeId here.
  std::set<uint64_t> visited_;
  std::map<uint64_t, int> layer_of_node_;  // of those that use parameters
  std::vector<uint64_t> maker_of_object_;
  std::vector<uint64_t> node_of_save_;
  GraphTrace trace_;
};

}  // namespace pinion

#endif  // PINION_BENCH_PEERS_GRAPH_TRACER_H_
