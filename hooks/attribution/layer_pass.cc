#include "pinion/hooks/attribution/layer_pass.h"

#include <ATen/ops/ones_like.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string_view>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/hooks/attribution/tap.h"
#include "pinion/hooks/autograd/libtorch_compat.h"

namespace pinion {
namespace {

using torch::autograd::Edge;
using torch::autograd::Node;

// Starts the history of a tensor that has none. Unlike AccumulateGrad it holds no tensor, so the
// tensor may be changed in place.
struct HistoryBegin : Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&& /*gradients*/) override {
    return {};
  }
};

using OnGradient = std::function<at::Tensor(const at::Tensor& gradient)>;

// A tensor hook that belongs to the node. The tensor's own list of hooks would outlive the history
// that the destructor removes, and hooks registered later would be lost in it.
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

// Returns whether backward reaches another `wanted` node behind `from`; `clean` caches dead ends.
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

// Captures the values at the taps of the requested layers in one forward pass, and their gradients
// in one backward pass. Later changes of a captured tensor by the model have no effect. A tensor
// continues as a clone in two cases: an operator in place would take its place in the graph, or it
// has neither history nor another owner. In the second case the tensor itself is offloaded
// (docs/maintainers/decisions/0032).
//
// Backward stops at the captured tensors and leaves every parameter's .grad alone. A hook takes
// each gradient when it is complete, so the graph keeps only gradients that backward itself needs.
//
// A LayerCapture lives until the devices' work is queued. PendingLayers then owns the copies, and
// the next pass can begin.
//
// Thread safety: OnTap may run on several threads, gradient hooks run on autograd's threads. All
// other calls come from one thread after the last tap.
class LayerCapture final : public TapListener {
 public:
  enum class Mode { kValues, kGradients };

  LayerCapture(const std::vector<std::string>& layers, Mode mode, const LayerOptions& options,
               const LayerCallbacks& callbacks, std::shared_ptr<HostCopies> copies);
  ~LayerCapture() override;  // removes the histories and hooks that taps added

  std::vector<at::Tensor> OnTap(std::string_view name, std::vector<at::Tensor> tensors) override;

  // Runs backward from `selected`, which has one number per example.
  void Backward(const at::Tensor& selected);

  // Returns the captured tensors; call it after Backward, if there is one.
  PendingLayers Finish();

 private:
  // Returns the index of the first layer of that name, or the number of layers if none has it.
  size_t PlaceOf(std::string_view name) const;
  // Returns what LayerCallbacks::replace gives for the value.
  at::Tensor Replaced(LayerPart part, const at::Tensor& value) const;
  // Registers for the tensor's gradient in `piece` and returns the tensor for the model.
  at::Tensor Watch(LayerPart part, const at::Tensor& tensor, LayerPiece& piece);
  // Registers `undo` to be called by the destructor.
  void Undo(std::function<void()> undo);

  const std::vector<std::string> layers_;
  const Mode mode_;
  const std::shared_ptr<CaptureSink> sink_;

  Mutex mu_;
  std::map<size_t, PiecesByDevice> captured_ ABSL_GUARDED_BY(mu_);  // by layer
  // By place in the graph. A slot expires when a later call of the same layer replaces it.
  struct Watched {
    torch::autograd::Edge edge;
    std::weak_ptr<GradientSlot> slot;
  };
  using Places = std::map<std::pair<const torch::autograd::Node*, uint32_t>, Watched>;
  Places watched_ ABSL_GUARDED_BY(mu_);
  // Reverts changes to the program's tensors.
  std::vector<std::function<void()>> undo_ ABSL_GUARDED_BY(mu_);
};

LayerCapture::LayerCapture(const std::vector<std::string>& layers, Mode mode,
                           const LayerOptions& options, const LayerCallbacks& callbacks,
                           std::shared_ptr<HostCopies> copies)
    : layers_(layers),
      mode_(mode),
      sink_(std::make_shared<CaptureSink>(options, callbacks, std::move(copies))) {}

LayerCapture::~LayerCapture() {
  sink_->Close();
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
  TORCH_CHECK(!tensors.empty(), "layer \"", name,
              "\" was tapped with no tensor: tap one, several, or a tuple of them");
  LayerPieces pieces(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    LayerPiece& piece = pieces[i];
    at::Tensor& tensor = tensors[i];
    const LayerPart part = {layer, i};
    if (sink_->callbacks.replace) tensor = Replaced(part, tensor);
    TORCH_CHECK(tensor.defined(), "layer \"", name, "\" was tapped with an undefined tensor, or ",
                "replaced by one: tap, or return, one that has a value");
    piece.captured_as = sink_->NextNumber();
    piece.sizes = tensor.sizes().vec();
    piece.options = tensor.options();
    if (sink_->options.activations) {
      const bool leaves_itself =
          !sink_->callbacks.output_function && sink_->copies->CanTake(tensor);
      piece.activation = *sink_->Deliver(
          part, tensor,
          leaves_itself ? HostCopies::Source::kStays : HostCopies::Source::kMayChange);
      // The clone runs concurrently with the copy to the host.
      if (leaves_itself) tensor = tensor.clone();
    }
    if (mode_ == Mode::kGradients) tensor = Watch(part, tensor, piece);
    // `replace` may return the same tensor for other calls of the layer.
    if (sink_->callbacks.replace) tensor = tensor.clone();
  }
  const int device = tensors.front().is_cpu() ? -1 : tensors.front().device().index();
  const MutexLock lock(mu_);
  // The pieces of an earlier call are destroyed with `pieces`, after the unlock.
  captured_[layer][device].swap(pieces);
  return tensors;
}

at::Tensor LayerCapture::Replaced(LayerPart part, const at::Tensor& value) const {
  at::Tensor tensor = sink_->callbacks.replace(part, value);
  if (!value.defined() || !tensor.defined()) return tensor;
  TORCH_CHECK(tensor.sizes() == value.sizes() && tensor.device() == value.device(),
              "LayerCallbacks::replace returned ", tensor.sizes(), " on ", tensor.device(),
              " for layer \"", layers_[part.layer], "\", whose value is ", value.sizes(), " on ",
              value.device(), ": return a tensor of that shape on that device");
  return tensor;
}

at::Tensor LayerCapture::Watch(LayerPart part, const at::Tensor& tensor, LayerPiece& piece) {
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
    const NodePtr begin = MakeNode<HistoryBegin>();
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
      piece.gradient = std::make_shared<GradientSlot>(sink_, part);
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
    // Backward passes through the other captured tensors on its way.
    if (slot == nullptr || LeadsToAnother(watched.edge.function.get(), wanted, clean)) continue;
    slot->EndBackwardHere();
    ends.push_back(watched.edge);
  }
  if (ends.empty()) return;
  torch::autograd::Engine::get_default_engine().execute(
      {torch::autograd::impl::gradient_edge(selected)}, {at::ones_like(selected)},
      /*keep_graph=*/false, /*create_graph=*/false, /*accumulate_grad=*/false, ends);
}

PendingLayers LayerCapture::Finish() {
  std::map<size_t, PiecesByDevice> captured;
  {
    const MutexLock lock(mu_);
    captured.swap(captured_);
  }
  return PendingLayers(layers_, sink_, std::move(captured));
}

}  // namespace

at::Tensor OutputOf(const AttributedForward& forward, const std::vector<at::Tensor>& inputs) {
  TORCH_CHECK(forward != nullptr,
              "the forward function is empty: give one that runs the model on its inputs");
  return forward(inputs);
}

PendingLayers StartGradients(const std::shared_ptr<HostCopies>& copies,
                             const AttributedForward& forward,
                             const std::vector<std::string>& layers,
                             const std::vector<at::Tensor>& inputs, const Target& target,
                             const LayerOptions& options, const LayerCallbacks& callbacks) {
  const at::AutoGradMode with_grad(true);
  LayerCapture capture(layers, LayerCapture::Mode::kGradients, options, callbacks, copies);
  at::Tensor selected;
  {
    const TapScope taps(&capture);
    selected = target.Select(OutputOf(forward, inputs));
  }
  capture.Backward(selected);
  return capture.Finish();
}

PendingLayers StartValues(const std::shared_ptr<HostCopies>& copies,
                          const AttributedForward& forward, const std::vector<std::string>& layers,
                          const std::vector<at::Tensor>& inputs, const LayerOptions& options,
                          const LayerCallbacks& callbacks) {
  const at::NoGradGuard no_grad;
  LayerCapture capture(layers, LayerCapture::Mode::kValues, options, callbacks, copies);
  {
    const TapScope taps(&capture);
    OutputOf(forward, inputs);
  }
  return capture.Finish();
}

}  // namespace pinion
