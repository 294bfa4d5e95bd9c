// The state of GraphOffload: it traces the first step and offloads in later ones.
//
// Thread safety: as GraphOffload.

#ifndef PINION_BENCH_PEERS_GRAPH_STATE_H_
#define PINION_BENCH_PEERS_GRAPH_STATE_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "pinion/bench/peers/graph_copies.h"
#include "pinion/bench/peers/graph_offload.h"
#include "pinion/bench/peers/graph_plan.h"
#include "pinion/bench/peers/graph_tracer.h"
#include "pinion/bench/peers/peer_stats.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"

namespace pinion {

class GraphState : public std::enable_shared_from_this<GraphState> {
 public:
  GraphState(const GraphOptions& options, c10::Device device);

  std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace& place);
  const PeerStats& stats() const { return copies_.stats(); }

 private:
  class Kept;
  class Left;

  void BeginStep();
  // Returns the copy of an offloaded object, which starts when its first view is saved.
  std::shared_ptr<GraphCopy> CopyOf(int object, const at::Tensor& view);
  // Drops sources planned for regions before this one.
  void DropSourcesBefore(int region);
  void Fetch(const std::vector<int>& objects);
  // Prepares the read of the step's saved tensor number `save`.
  void BeforeRead(int save);

  const GraphLimits limits_;
  GraphTracer tracer_;
  GraphCopies copies_;
  std::optional<GraphPlan> plan_;  // nullopt in the first step

  // State of the running step.
  int saves_ = 0;
  bool is_backward_ = false;
  std::set<int> layers_reached_;                                       // in backward
  std::vector<std::weak_ptr<GraphCopy>> by_object_;                    // graphs own them
  std::vector<std::pair<int, std::shared_ptr<GraphCopy>>> on_device_;  // with the object
};

}  // namespace pinion

#endif  // PINION_BENCH_PEERS_GRAPH_STATE_H_
