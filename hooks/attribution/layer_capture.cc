#include "pinion/hooks/attribution/layer_capture.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstddef>

#include "absl/container/flat_hash_set.h"

namespace pinion {
namespace {

using torch::autograd::Edge;
using torch::autograd::Node;

// Where the history of a tensor begins that has none of its own. Unlike a leaf's node it holds no
// tensor, and what it stands for may be changed in place.
struct HistoryBegin : Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&& /*gradients*/) override {
    return {};
  }
};

using OnGradient = std::function<at::Tensor(const at::Tensor& gradient)>;

// A tensor's hook that is the node's: the tensor's own list of hooks would outlive the history that
// is taken from it again, and later hooks would be lost in it.
class HookOfNode final : public torch::autograd::FunctionPreHook {
 public:
  HookOfNode(uint32_t place, OnGradient on_gradient)
      : place_(place), on_gradient_(std::move(on_gradient)) {}

  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    torch::autograd::variable_list passed = gradients;
    passed[place_] = on_gradient_(passed[place_]);
    return passed;
  }

 private:
  const uint32_t place_;
  const OnGradient on_gradient_;
};

// Whether backward goes on from `from` to another one of `wanted`. `clean` has nodes from which it
// does not.
bool LeadsToAnother(Node* from, const absl::flat_hash_set<const Node*>& wanted,
                    absl::flat_hash_set<const Node*>& clean) {
  absl::flat_hash_set<const Node*> seen;
  std::vector<Node*> next = {from};
  while (!next.empty()) {
    Node* const node = next.back();
    next.pop_back();
    for (const Edge& edge : node->next_edges()) {
      Node* const behind = edge.function.get();
      if (behind == nullptr || clean.contains(behind)) continue;
      if (wanted.contains(behind)) return true;
      if (seen.insert(behind).second) next.push_back(behind);
    }
  }
  clean.insert(seen.begin(), seen.end());
  return false;
}

}  // namespace

at::Tensor LayerCapture::GradientSlot::Take(const at::Tensor& gradient) {
  if (!gradient.defined()) return gradient;
  Delivery delivery;
  if (keep_on_device_) {
    delivery.kept = gradient;
  } else {
    delivery.copy = copies_->Start(gradient, HostCopies::Source::kStays);
  }
  {
    const MutexLock lock(mu_);
    delivery_ = std::move(delivery);
    has_come_ = true;
  }
  if (!ends_here_) return gradient;
  // The engine keeps what it is asked for until backward ends: so it is given one element.
  return at::empty({}, gradient.options()).expand(gradient.sizes());
}

at::Tensor LayerCapture::GradientSlot::Wait() {
  Delivery delivery;
  {
    const MutexLock lock(mu_);
    if (!has_come_) return at::Tensor();
    delivery = delivery_;
  }
  return delivery.Wait();
}

LayerCapture::LayerCapture(const std::vector<std::string>& layers, Mode mode,
                           const LayerOptions& options, std::shared_ptr<HostCopies> copies)
    : layers_(layers), mode_(mode), options_(options), copies_(std::move(copies)) {}

LayerCapture::~LayerCapture() {
  for (const std::function<void()>& undo : undo_) undo();
}

std::vector<at::Tensor> LayerCapture::OnTap(std::string_view name,
                                            std::vector<at::Tensor> tensors) {
  if (std::find(layers_.begin(), layers_.end(), name) == layers_.end()) return tensors;
  Pieces pieces(tensors.size());
  const int device = tensors.front().is_cpu() ? -1 : tensors.front().device().index();
  for (size_t i = 0; i < tensors.size(); ++i) {
    Piece& piece = pieces[i];
    at::Tensor& tensor = tensors[i];
    piece.sizes = tensor.sizes().vec();
    piece.options = tensor.options();
    if (options_.activations && options_.keep_on_device) {
      piece.activation.kept = tensor.detach().clone();
    } else if (options_.activations) {
      piece.activation.copy = copies_->Start(tensor, HostCopies::Source::kMayChange);
    }
    if (mode_ == Mode::kGradients) tensor = Watch(name, tensor, piece);
  }
  captured_[std::string(name)].insert_or_assign(device, std::move(pieces));
  return tensors;
}

at::Tensor LayerCapture::Watch(std::string_view name, const at::Tensor& tensor, Piece& piece) {
  TORCH_CHECK(torch::autograd::isDifferentiableType(tensor.scalar_type()), "layer \"", name,
              "\" is of ", tensor.scalar_type(),
              ", which has no gradient: ask for its activation alone, or for another layer");
  bool goes_on = !tensor.is_view();
  if (!tensor.requires_grad() && tensor.is_view()) {
    tensor.requires_grad_();
    undo_.push_back([tensor] {
      if (tensor.is_leaf()) tensor.requires_grad_(false);
    });
  } else if (!tensor.requires_grad()) {
    const auto begin = std::make_shared<HistoryBegin>();
    torch::autograd::set_history(tensor, begin);
    c10::weak_intrusive_ptr<c10::TensorImpl> weak(tensor.getIntrusivePtr());
    undo_.push_back([weak = std::move(weak), begin] {
      auto impl = weak.lock();
      if (!impl) return;
      const at::Tensor alive(std::move(impl));
      if (torch::autograd::impl::grad_fn_unsafe(alive) == begin.get()) alive.detach_();
    });
  } else if (tensor.is_leaf()) {
    goes_on = false;
  }
  const Edge edge = torch::autograd::impl::gradient_edge(tensor);
  Watched& watched = watched_[{edge.function.get(), edge.input_nr}];
  piece.gradient = watched.slot.lock();
  if (piece.gradient == nullptr) {
    piece.gradient = std::make_shared<GradientSlot>(options_.keep_on_device, copies_);
    watched = {edge, piece.gradient};
    const auto on_gradient = [slot = watched.slot](const at::Tensor& gradient) {
      const std::shared_ptr<GradientSlot> wanted = slot.lock();
      return wanted == nullptr ? gradient : wanted->Take(gradient);
    };
    if (tensor.is_leaf()) {
      const unsigned hook = tensor.register_hook(on_gradient);
      undo_.push_back([tensor, hook] { tensor.remove_hook(hook); });
    } else {
      edge.function->add_tensor_pre_hook(std::make_unique<HookOfNode>(edge.input_nr, on_gradient));
    }
  }
  return goes_on ? tensor : tensor.clone();
}

void LayerCapture::Backward(const at::Tensor& selected) {
  if (!selected.requires_grad()) return;
  absl::flat_hash_set<const Node*> wanted;
  for (const auto& [place, watched] : watched_) {
    if (!watched.slot.expired()) wanted.insert(place.first);
  }
  absl::flat_hash_set<const Node*> clean;
  torch::autograd::edge_list ends;
  for (const auto& [place, watched] : watched_) {
    const std::shared_ptr<GradientSlot> slot = watched.slot.lock();
    // Backward passes the others on its way.
    if (slot == nullptr || LeadsToAnother(watched.edge.function.get(), wanted, clean)) continue;
    slot->EndBackwardHere();
    ends.push_back(watched.edge);
  }
  if (ends.empty()) return;
  torch::autograd::Engine::get_default_engine().execute(
      {torch::autograd::impl::gradient_edge(selected)}, {at::ones_like(selected)},
      /*keep_graph=*/false, /*create_graph=*/false, /*accumulate_grad=*/false, ends);
}

std::vector<LayerResult> LayerCapture::Results() {
  copies_->LetGo();
  const bool is_error = options_.unused_layers == UnusedLayers::kError;
  std::vector<LayerResult> results;
  for (const std::string& layer : layers_) {
    LayerResult& result = results.emplace_back();
    const auto found = captured_.find(layer);
    result.ran = found != captured_.end();
    TORCH_CHECK(result.ran || !is_error, "layer \"", layer,
                "\" was not called in forward: correct its name, or set "
                "LayerOptions::unused_layers to kZeros");
    if (!result.ran) continue;
    const std::vector<const Pieces*> devices = InDeviceOrder(layer, found->second);
    for (size_t i = 0; i < devices.front()->size(); ++i) {
      result.tensors.push_back(Gather(devices, i));
      TORCH_CHECK(mode_ == Mode::kValues || result.tensors.back().connected || !is_error,
                  "the output does not depend on layer \"", layer, "\", tensor ", i,
                  ": choose another layer or target, or set LayerOptions::unused_layers to "
                  "kZeros");
    }
  }
  return results;
}

std::vector<const LayerCapture::Pieces*> LayerCapture::InDeviceOrder(
    const std::string& layer, const PiecesByDevice& by_device) const {
  std::vector<const Pieces*> ordered;
  if (by_device.size() == 1 || options_.device_ids.empty()) {
    for (const auto& [index, pieces] : by_device) ordered.push_back(&pieces);
  } else {
    for (const int index : options_.device_ids) {
      const auto found = by_device.find(index);
      if (found != by_device.end()) ordered.push_back(&found->second);
    }
    TORCH_CHECK(ordered.size() == by_device.size(), "layer \"", layer, "\" ran on ",
                by_device.size(), " devices, of which LayerOptions::device_ids names ",
                ordered.size(), ": name each device once");
  }
  for (const Pieces* pieces : ordered) {
    TORCH_CHECK(pieces->size() == ordered.front()->size(), "layer \"", layer, "\" has ",
                ordered.front()->size(), " tensors on one device and ", pieces->size(),
                " on another: its parts must be alike");
  }
  return ordered;
}

LayerTensor LayerCapture::Gather(const std::vector<const Pieces*>& devices, size_t index) const {
  LayerTensor result;
  std::vector<at::Tensor> activations, gradients;
  for (const Pieces* pieces : devices) {
    const Piece& piece = (*pieces)[index];
    if (options_.activations) activations.push_back(piece.activation.Wait());
    if (mode_ == Mode::kValues) continue;
    at::Tensor gradient = piece.gradient->Wait();
    result.connected = result.connected || gradient.defined();
    if (!gradient.defined()) {
      const c10::Device device = options_.keep_on_device ? piece.options.device() : at::kCPU;
      gradient = at::zeros(piece.sizes, piece.options.device(device));
    }
    gradients.push_back(std::move(gradient));
  }
  if (!activations.empty()) result.activation = Join(activations);
  if (!gradients.empty()) result.gradient = Join(gradients);
  return result;
}

at::Tensor LayerCapture::Join(const std::vector<at::Tensor>& pieces) const {
  if (pieces.size() == 1) return pieces.front();
  if (!options_.keep_on_device) return copies_->Concatenate(pieces);
  std::vector<at::Tensor> on_first;
  for (const at::Tensor& piece : pieces) on_first.push_back(piece.to(pieces.front().device()));
  return at::cat(on_first);
}

}  // namespace pinion
