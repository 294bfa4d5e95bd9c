#include "pinion/hooks/activations/pack_scope.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>

#include "pinion/allocator/base/check.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/autograd/torch_bridge.h"

namespace pinion {

namespace {

std::atomic<ScopeId> last_scope_id{0};

class KeptWithOthers : public SavedTensor {
 public:
  KeptWithOthers(std::unique_ptr<SavedTensor> kept, HeadNodes::Storages others)
      : kept_(std::move(kept)), others_(std::move(others)) {}

  at::Tensor Unpack() override { return kept_->Unpack(); }

 private:
  const std::unique_ptr<SavedTensor> kept_;
  const HeadNodes::Storages others_;
};

// Whether the node only casts its input or views all of it.
bool IsCastOrView(const torch::autograd::Node* node) {
  static constexpr std::string_view kNames[] = {"ToCopyBackward0",    "TBackward0",
                                                "TransposeBackward0", "PermuteBackward0",
                                                "ViewBackward0",      "ReshapeAliasBackward0"};
  const std::string name = node->name();
  return std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
}

// Returns the leaf that `tensor` is a cast of, through any casts, transposes and views; undefined
// if there is none. Other functions of one leaf, such as an embedding, do not count.
at::Tensor CastFrom(const at::Tensor& tensor) {
  constexpr size_t kMostSteps = 4;
  absl::InlinedVector<const torch::autograd::Node*, kMostSteps> steps;
  const torch::autograd::Node* node = tensor.grad_fn().get();
  while (node != nullptr && node->num_outputs() == 1 && steps.size() < kMostSteps) {
    steps.push_back(node);
    node = node->next_edge(0).function.get();
  }
  if (node == nullptr || typeid(*node) != typeid(torch::autograd::AccumulateGrad)) return {};
  // Compare names last, since each builds a string.
  if (!std::all_of(steps.begin(), steps.end(), IsCastOrView)) return {};
  return static_cast<const torch::autograd::AccumulateGrad&>(*node).variable;
}

}  // namespace

ScopeId NewScopeId() { return ++last_scope_id; }

ScopeId LastScopeId() { return last_scope_id; }

void WarnOfNoTensorOn(c10::DeviceType device_type) {
  const std::string type = c10::DeviceTypeName(device_type, /*lower_case=*/true);
  PINION_LOG(kWarning) << "an OffloadScope of a session for \"" << type
                       << "\" offloads nothing: autograd has saved no strided tensor on " << type
                       << ". Move the model and its inputs there before forward";
}

bool HeadNodes::IsParameter(const at::Tensor& tensor) const {
  if (parameters_.Contains(tensor)) return true;
  const at::Tensor leaf = CastFrom(tensor);
  return leaf.defined() && IsPlainTensor(leaf) && parameters_.Contains(leaf);
}

HeadNodes::Save HeadNodes::OnSave(const at::Tensor& tensor, const NodeId& node) {
  Save save;
  save.is_parameter = IsParameter(tensor);
  MutexLock lock(mu_);
  Youngest& youngest = youngest_[node.thread];
  if (youngest.sequence != node.sequence) youngest = {node.sequence, false, {}};
  youngest.is_heads |= save.is_parameter;
  save.is_heads = youngest.is_heads;
  if (!save.is_heads) {
    youngest.saved.push_back(tensor.storage().getWeakStorageImpl());
    return save;
  }
  for (const WeakStorage& saved : youngest.saved) {
    if (auto impl = saved.lock()) save.earlier.emplace_back(std::move(impl));
  }
  youngest.saved.clear();
  return save;
}

std::unique_ptr<SavedTensor> KeepWith(const at::Tensor& tensor, HeadNodes::Storages others) {
  std::unique_ptr<SavedTensor> kept = KeepTensor(tensor);
  if (others.empty()) return kept;
  return std::make_unique<KeptWithOthers>(std::move(kept), std::move(others));
}

}  // namespace pinion
