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

LayerCapture::LayerCapture(const std::vector<std::string>& layers, Mode mode,
                           const LayerOptions& options, const LayerCallbacks& callbacks,
                           std::shared_ptr<HostCopies> copies)
    : layers_(layers),
      mode_(mode),
      way_(std::make_shared<LayerWay>(options, callbacks, std::move(copies))) {}

LayerCapture::~LayerCapture() {
  way_->Close();
  std::vector<std::function<void()>> undo;
  {
    const MutexLock lock(mu_);
    undo.swap(undo_);
  }
  for (const std::function<void()>& one : undo) one();
}

void LayerCapture::Undo(std::function<void()> undo) {
  const MutexLock lock(mu_);
  undo_.push_back(std::move(undo));
}

size_t LayerCapture::PlaceOf(std::string_view name) const {
  return static_cast<size_t>(std::find(layers_.begin(), layers_.end(), name) - layers_.begin());
}

std::vector<at::Tensor> LayerCapture::OnTap(std::string_view name,
                                            std::vector<at::Tensor> tensors) {
  const size_t layer = PlaceOf(name);
  if (layer == layers_.size()) return tensors;
  Pieces pieces(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    Piece& piece = pieces[i];
    at::Tensor& tensor = tensors[i];
    const LayerPart part = {layer, i};
    if (way_->callbacks.replace) tensor = way_->callbacks.replace(part, tensor);
    piece.captured_as = way_->NextNumber();
    piece.sizes = tensor.sizes().vec();
    piece.options = tensor.options();
    if (way_->options.activations) {
      piece.activation = *way_->Deliver(part, tensor, HostCopies::Source::kMayChange);
    }
    if (mode_ == Mode::kGradients) tensor = Watch(part, tensor, piece);
    // Other calls of the layer are given the same tensor.
    if (way_->callbacks.replace) tensor = tensor.clone();
  }
  const int device = tensors.front().is_cpu() ? -1 : tensors.front().device().index();
  const MutexLock lock(mu_);
  // What an earlier call has left goes with `pieces`, behind the lock.
  captured_[layer][device].swap(pieces);
  return tensors;
}

at::Tensor LayerCapture::Watch(LayerPart part, const at::Tensor& tensor, Piece& piece) {
  TORCH_CHECK(torch::autograd::isDifferentiableType(tensor.scalar_type()), "layer \"",
              layers_[part.layer], "\" is of ", tensor.scalar_type(),
              ", which has no gradient: ask for its activation alone, or for another layer");
  bool goes_on = !tensor.is_view();
  if (!tensor.requires_grad() && tensor.is_view()) {
    tensor.requires_grad_();
    Undo([tensor] {
      if (tensor.is_leaf()) tensor.requires_grad_(false);
    });
  } else if (!tensor.requires_grad()) {
    const auto begin = std::make_shared<HistoryBegin>();
    torch::autograd::set_history(tensor, begin);
    c10::weak_intrusive_ptr<c10::TensorImpl> weak(tensor.getIntrusivePtr());
    Undo([weak = std::move(weak), begin] {
      auto impl = weak.lock();
      if (!impl) return;
      const at::Tensor alive(std::move(impl));
      if (torch::autograd::impl::grad_fn_unsafe(alive) == begin.get()) alive.detach_();
    });
  } else if (tensor.is_leaf()) {
    goes_on = false;
  }
  const Edge edge = torch::autograd::impl::gradient_edge(tensor);
  bool is_new = false;
  {
    const MutexLock lock(mu_);
    Watched& watched = watched_[{edge.function.get(), edge.input_nr}];
    piece.gradient = watched.slot.lock();
    is_new = piece.gradient == nullptr;
    if (is_new) {
      piece.gradient = std::make_shared<GradientSlot>(way_, part);
      watched = {edge, piece.gradient};
    }
  }
  if (is_new) {
    const auto on_gradient = [slot = std::weak_ptr(piece.gradient)](const at::Tensor& gradient) {
      const std::shared_ptr<GradientSlot> wanted = slot.lock();
      return wanted == nullptr ? gradient : wanted->Take(gradient);
    };
    if (tensor.is_leaf()) {
      const unsigned hook = tensor.register_hook(on_gradient);
      Undo([tensor, hook] { tensor.remove_hook(hook); });
    } else {
      edge.function->add_tensor_pre_hook(std::make_unique<HookOfNode>(edge.input_nr, on_gradient));
    }
  }
  return goes_on ? tensor : tensor.clone();
}

void LayerCapture::Backward(const at::Tensor& selected) {
  if (!selected.requires_grad()) return;
  Places places;
  {
    const MutexLock lock(mu_);
    places = watched_;
  }
  absl::flat_hash_set<const Node*> wanted;
  for (const auto& [place, watched] : places) {
    if (!watched.slot.expired()) wanted.insert(place.first);
  }
  absl::flat_hash_set<const Node*> clean;
  torch::autograd::edge_list ends;
  for (const auto& [place, watched] : places) {
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
  way_->copies->LetGo();
  std::map<size_t, PiecesByDevice> captured;
  {
    const MutexLock lock(mu_);
    captured.swap(captured_);
  }
  const bool is_error = way_->options.unused_layers == UnusedLayers::kError;
  std::vector<LayerResult> results(layers_.size());
  std::map<size_t, std::vector<Pieces*>> devices;  // by layer
  std::vector<std::pair<uint64_t, LayerPart>> arrivals;
  for (size_t layer = 0; layer < layers_.size(); ++layer) {
    const std::string& name = layers_[layer];
    if (PlaceOf(name) != layer) continue;  // it is asked for twice
    results[layer].ran = captured.contains(layer);
    TORCH_CHECK(results[layer].ran || !is_error, "layer \"", name,
                "\" was not called in forward: correct its name, or set "
                "LayerOptions::unused_layers to kZeros");
    if (!results[layer].ran) continue;
    devices[layer] = InDeviceOrder(layer, captured[layer]);
    results[layer].tensors.resize(devices[layer].front()->size());
    for (size_t i = 0; i < results[layer].tensors.size(); ++i) {
      const uint64_t last_gradient = LastGradient(devices[layer], i);
      TORCH_CHECK(mode_ == Mode::kValues || last_gradient > 0 || !is_error,
                  "the output does not depend on layer \"", name, "\", tensor ", i,
                  ": choose another layer or target, or set LayerOptions::unused_layers to "
                  "kZeros");
      const uint64_t value = devices[layer].back()->at(i).captured_as;
      arrivals.push_back({std::max(value, last_gradient), {layer, i}});
    }
  }
  std::sort(arrivals.begin(), arrivals.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  for (const auto& [captured_as, part] : arrivals) {
    LayerTensor& tensor = results[part.layer].tensors[part.tensor];
    tensor = Gather(part, devices[part.layer]);
    if (!way_->callbacks.on_arrival) continue;
    const at::NoGradGuard no_grad;
    const uint64_t memory_bytes = way_->callbacks.on_arrival(part, tensor);
    if (!way_->options.keep_on_device) way_->copies->ChargeHostArithmetic(memory_bytes);
  }
  for (size_t layer = 0; layer < layers_.size(); ++layer) {
    const size_t first = PlaceOf(layers_[layer]);
    if (first != layer) results[layer] = results[first];
  }
  return results;
}

uint64_t LayerCapture::LastGradient(const std::vector<Pieces*>& devices, size_t tensor) {
  uint64_t last = 0;
  for (const Pieces* pieces : devices) {
    const Piece& piece = (*pieces)[tensor];
    if (piece.gradient != nullptr) last = std::max(last, piece.gradient->captured_as());
  }
  return last;
}

std::vector<LayerCapture::Pieces*> LayerCapture::InDeviceOrder(size_t layer,
                                                               PiecesByDevice& by_device) const {
  std::vector<Pieces*> ordered;
  if (by_device.size() == 1 || way_->options.device_ids.empty()) {
    for (auto& [index, pieces] : by_device) ordered.push_back(&pieces);
  } else {
    for (const int index : way_->options.device_ids) {
      const auto found = by_device.find(index);
      if (found != by_device.end()) ordered.push_back(&found->second);
    }
    TORCH_CHECK(ordered.size() == by_device.size(), "layer \"", layers_[layer], "\" ran on ",
                by_device.size(), " devices, of which LayerOptions::device_ids names ",
                ordered.size(), ": name each device once");
  }
  for (const Pieces* pieces : ordered) {
    TORCH_CHECK(pieces->size() == ordered.front()->size(), "layer \"", layers_[layer], "\" has ",
                ordered.front()->size(), " tensors on one device and ", pieces->size(),
                " on another: its parts must be alike");
  }
  return ordered;
}

LayerTensor LayerCapture::Gather(LayerPart part, const std::vector<Pieces*>& devices) {
  LayerTensor result;
  std::vector<at::Tensor> activations, gradients;
  for (Pieces* pieces : devices) {
    Piece& piece = (*pieces)[part.tensor];
    if (way_->options.activations) {
      activations.push_back(std::exchange(piece.activation, {}).Wait());
    }
    if (mode_ == Mode::kValues) continue;
    const std::shared_ptr<GradientSlot> slot = std::exchange(piece.gradient, nullptr);
    at::Tensor gradient = slot->Wait(/*is_last=*/slot.use_count() == 1);
    result.connected = result.connected || gradient.defined();
    if (!gradient.defined()) {
      const c10::Device device = way_->options.keep_on_device ? piece.options.device() : at::kCPU;
      gradient = at::zeros(piece.sizes, piece.options.device(device));
      if (way_->callbacks.output_function) {
        gradient = way_->callbacks.output_function(part, gradient);
      }
    }
    gradients.push_back(std::move(gradient));
  }
  if (!activations.empty()) result.activation = Join(activations);
  if (!gradients.empty()) result.gradient = Join(gradients);
  return result;
}

at::Tensor LayerCapture::Join(const std::vector<at::Tensor>& pieces) const {
  if (pieces.size() == 1) return pieces.front();
  if (!way_->options.keep_on_device) return way_->copies->Concatenate(pieces);
  std::vector<at::Tensor> on_first;
  for (const at::Tensor& piece : pieces) on_first.push_back(piece.to(pieces.front().device()));
  return at::cat(on_first);
}

}  // namespace pinion
