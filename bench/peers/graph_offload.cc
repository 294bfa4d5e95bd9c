#include "pinion/bench/peers/graph_offload.h"

#include "pinion/bench/peers/graph_state.h"

namespace pinion {

GraphOffload::GraphOffload(const GraphOptions& options, c10::Device device)
    : state_(std::make_shared<GraphState>(options, device)) {}

std::unique_ptr<SavedTensor> GraphOffload::Pack(const at::Tensor& tensor, const GraphPlace& place) {
  return state_->Pack(tensor, place);
}

PeerStats GraphOffload::GetStats() const { return state_->stats(); }

}  // namespace pinion
