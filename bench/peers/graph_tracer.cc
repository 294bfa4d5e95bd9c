#include "pinion/bench/peers/graph_tracer.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <memory>

namespace pinion {
namespace {

const c10::StorageImpl* StorageOf(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl();
}

}  // namespace

at::Tensor WholeOf(const at::Tensor& tensor) {
  return tensor.is_view() ? at::Tensor(tensor._base()) : tensor;
}

GraphTracer::GraphTracer(const std::vector<std::vector<at::Tensor>>& layers,
                         const std::vector<at::Tensor>& inputs, c10::Device device)
    : device_(device) {
  const auto give = [this](const at::Tensor& tensor, int layer) {
    given_.emplace(StorageOf(tensor), Given{tensor.storage(), layer});
  };
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    for (const at::Tensor& parameter : layers[layer]) give(parameter, static_cast<int>(layer));
  }
  for (const at::Tensor& input : inputs) give(input, kNotInLayers);
}

void GraphTracer::Save(const at::Tensor& tensor, const GraphPlace& place) {
  trace_.saves.push_back({.object = ObjectOf(tensor, place)});
  node_of_save_.push_back(place.node.sequence);
  if (tensor.grad_fn() != nullptr) FindLayers(tensor.grad_fn().get());
}

int GraphTracer::ObjectOf(const at::Tensor& tensor, const GraphPlace& place) {
  const at::Tensor whole = WholeOf(tensor);
  if (whole.device() != device_ || given_.contains(StorageOf(tensor))) return kNoObject;
  const auto [entry, is_new] = objects_.try_emplace(
      StorageOf(tensor), Object{tensor.storage().getWeakStorageImpl(),
                                static_cast<int>(trace_.objects.size()), whole.scalar_type()});
  const Object& object = entry->second;
  if (is_new) {
    trace_.objects.push_back(
        {.size_bytes = whole.nbytes(), .is_contiguous = whole.is_contiguous()});
    // A tensor without history, such as a dropout mask, was made by the operator that saves it.
    const std::shared_ptr<torch::autograd::Node> maker = whole.grad_fn();
    maker_of_object_.push_back(maker == nullptr ? place.node.sequence : maker->sequence_nr() + 1);
  }
  // Views of several tensors or types over one storage cannot be fetched as one.
  GraphTrace::Object& traced = trace_.objects[object.number];
  traced.is_contiguous = traced.is_contiguous && whole.storage_offset() == 0 &&
                         whole.nbytes() == traced.size_bytes && tensor.scalar_type() == object.type;
  return object.number;
}

void GraphTracer::Read(int save) {
  if (trace_.reads.empty()) {
    FindLayers(torch::autograd::get_current_node().get());
    AssignRegions();
  }
  trace_.reads.push_back(save);
}

void GraphTracer::FindLayers(torch::autograd::Node* node) {
  std::vector<torch::autograd::Node*> found = {node};
  while (!found.empty()) {
    torch::autograd::Node* const next = found.back();
    found.pop_back();
    const uint64_t number = next->sequence_nr() + 1;
    if (!visited_.insert(number).second) continue;
    for (const torch::autograd::Edge& edge : next->next_edges()) {
      if (!edge.is_valid()) continue;
      auto* const leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(edge.function.get());
      if (leaf == nullptr) {
        found.push_back(edge.function.get());
        continue;
      }
      const auto given = given_.find(StorageOf(leaf->variable));
      if (given != given_.end()) layer_of_node_.emplace(number, given->second.layer);
    }
  }
}

void GraphTracer::AssignRegions() {
  struct Region {
    uint64_t first_node;
    int layer;
  };
  std::vector<Region> regions = {{0, kNotInLayers}};
  for (const auto& [node, layer] : layer_of_node_) {
    if (layer != regions.back().layer) regions.push_back({node, layer});
  }
  const auto assign = [&regions](uint64_t node, auto& traced) {
    const auto after =
        std::upper_bound(regions.begin(), regions.end(), node,
                         [](uint64_t n, const Region& region) { return n < region.first_node; });
    traced.region = static_cast<int>(after - regions.begin()) - 1;
    traced.layer = regions[traced.region].layer;
  };
  for (size_t i = 0; i < trace_.objects.size(); ++i) {
    assign(maker_of_object_[i], trace_.objects[i]);
  }
  for (size_t i = 0; i < trace_.saves.size(); ++i) assign(node_of_save_[i], trace_.saves[i]);
  given_.clear();  // the first batch may be freed
}

}  // namespace pinion
