#include "pinion/bench/peers/graph_state.h"

#include <ATen/ops/as_strided.h>
#include <c10/util/Exception.h>

#include <limits>

#include "pinion/hooks/autograd/kept_tensor.h"

namespace pinion {

class GraphState::Kept : public SavedTensor {
 public:
  Kept(std::shared_ptr<GraphState> state, int save, const at::Tensor& tensor)
      : state_(std::move(state)), save_(save), kept_(KeepTensor(tensor)) {}

  at::Tensor Unpack() override {
    state_->BeforeRead(save_);
    return kept_->Unpack();
  }

 private:
  const std::shared_ptr<GraphState> state_;
  const int save_;
  const std::unique_ptr<SavedTensor> kept_;
};

class GraphState::Left : public SavedTensor {
 public:
  Left(std::shared_ptr<GraphState> state, int save, std::shared_ptr<GraphCopy> copy,
       const at::Tensor& tensor)
      : state_(std::move(state)),
        save_(save),
        copy_(std::move(copy)),
        sizes_(tensor.sizes().vec()),
        strides_(tensor.strides().vec()),
        storage_offset_(tensor.storage_offset()) {}

  at::Tensor Unpack() override {
    state_->BeforeRead(save_);
    return at::as_strided(state_->copies_.Use(*copy_), sizes_, strides_, storage_offset_);
  }

 private:
  const std::shared_ptr<GraphState> state_;
  const int save_;
  const std::shared_ptr<GraphCopy> copy_;
  const std::vector<int64_t> sizes_;
  const std::vector<int64_t> strides_;
  const int64_t storage_offset_;
};

GraphState::GraphState(const GraphOptions& options, c10::Device device)
    : limits_(options.limits), tracer_(options.layers, options.inputs, device), copies_(device) {}

std::unique_ptr<SavedTensor> GraphState::Pack(const at::Tensor& tensor, const GraphPlace& place) {
  if (is_backward_) BeginStep();
  const int save = saves_++;
  if (!plan_.has_value()) {
    tracer_.Save(tensor, place);
    return std::make_unique<Kept>(shared_from_this(), save, tensor);
  }
  const std::vector<GraphTrace::Save>& traced = tracer_.trace().saves;
  TORCH_CHECK(save < static_cast<int>(traced.size()), "this step saves more than the first one's ",
              traced.size(), " tensors");
  DropSourcesBefore(traced[save].region);
  const int object = traced[save].object;
  if (object == kNoObject || plan_->leaves_after[object] == GraphPlan::kStays) {
    return std::make_unique<Kept>(shared_from_this(), save, tensor);
  }
  return std::make_unique<Left>(shared_from_this(), save, CopyOf(object, tensor), tensor);
}

void GraphState::BeginStep() {
  if (!plan_.has_value()) plan_ = PlanGraph(tracer_.trace(), limits_);
  saves_ = 0;
  is_backward_ = false;
  layers_reached_.clear();
  by_object_.assign(tracer_.trace().objects.size(), {});
}

std::shared_ptr<GraphCopy> GraphState::CopyOf(int object, const at::Tensor& view) {
  if (auto copy = by_object_[object].lock()) return copy;
  const at::Tensor whole = WholeOf(view);
  const uint64_t traced_bytes = tracer_.trace().objects[object].size_bytes;
  TORCH_CHECK(whole.nbytes() == traced_bytes && whole.is_contiguous(), "this step saves ",
              whole.nbytes(), " bytes where the first one has saved ", traced_bytes);
  auto copy = copies_.CopyOut(whole);
  by_object_[object] = copy;
  on_device_.emplace_back(object, copy);
  return copy;
}

void GraphState::DropSourcesBefore(int region) {
  std::erase_if(on_device_, [&](const auto& entry) {
    const bool goes = plan_->leaves_after[entry.first] < region;
    if (goes) copies_.DropSource(*entry.second);
    return goes;
  });
}

void GraphState::Fetch(const std::vector<int>& objects) {
  for (const int object : objects) {
    if (const auto copy = by_object_[object].lock()) copies_.Fetch(*copy);
  }
}

void GraphState::BeforeRead(int save) {
  const bool is_first = !is_backward_;
  is_backward_ = true;
  if (!plan_.has_value()) {
    tracer_.Read(save);
    return;
  }
  const std::vector<GraphTrace::Save>& traced = tracer_.trace().saves;
  if (is_first) {
    TORCH_CHECK(saves_ == static_cast<int>(traced.size()), "this step saves ", saves_,
                " tensors, and the first one has saved ", traced.size());
    DropSourcesBefore(std::numeric_limits<int>::max());
    Fetch(plan_->fetched_first);
  }
  const int layer = traced[save].layer;
  if (layers_reached_.insert(layer).second) Fetch(plan_->fetched_at[layer]);
}

}  // namespace pinion
