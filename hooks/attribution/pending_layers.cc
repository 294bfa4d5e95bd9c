// What happens to a captured tensor: its delivery to the host, and the wait for it.

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Device.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "absl/cleanup/cleanup.h"
#include "pinion/hooks/attribution/layer_pass.h"

namespace pinion {
namespace {

// Returns the capture number of the tensor's last gradient, or 0 without one.
uint64_t LastGradient(const std::vector<LayerPieces>& devices, size_t tensor) {
  uint64_t last = 0;
  for (const LayerPieces& pieces : devices) {
    const LayerPiece& piece = pieces[tensor];
    if (piece.gradient != nullptr) last = std::max(last, piece.gradient->captured_as());
  }
  return last;
}

}  // namespace

std::optional<HostCopy> CaptureSink::Deliver(LayerPart part, const at::Tensor& tensor,
                                             HostCopies::Source source) const {
  {
    const MutexLock lock(mu_);
    if (is_closed_) return std::nullopt;
    ++delivering_;
  }
  const absl::Cleanup end = [this] {
    const MutexLock lock(mu_);
    if (--delivering_ == 0) delivered_.NotifyAll();
  };
  at::Tensor leaving = tensor.detach();
  if (callbacks.output_function) {
    const at::NoGradGuard no_grad;
    leaving = callbacks.output_function(part, leaving);
    TORCH_CHECK(leaving.defined(),
                "LayerCallbacks::output_function returned an undefined tensor for layer ",
                part.layer, ": return what is to leave in its place");
    // Of a result that shares the model's memory, the model may change the bytes.
    const bool has_own_memory =
        tensor.has_storage() && leaving.has_storage() && !leaving.is_alias_of(tensor);
    if (has_own_memory) source = HostCopies::Source::kStays;
  }
  if (!options.keep_on_device) return copies->Start(leaving, source);
  return HostCopy(source == HostCopies::Source::kStays ? leaving : leaving.clone());
}

void CaptureSink::Close() {
  MutexLock lock(mu_);
  is_closed_ = true;
  while (delivering_ > 0) delivered_.Wait(mu_);
}

at::Tensor GradientSlot::Take(const at::Tensor& gradient) {
  if (!gradient.defined()) return gradient;
  std::optional<HostCopy> delivery = sink_->Deliver(part_, gradient, HostCopies::Source::kStays);
  if (!delivery.has_value()) return gradient;
  {
    const MutexLock lock(mu_);
    delivery_ = *std::move(delivery);
    captured_as_ = sink_->NextNumber();
  }
  if (!ends_here_) return gradient;
  // The engine keeps the gradients of its end points until backward ends, so it gets one element.
  return at::empty({}, gradient.options()).expand(gradient.sizes());
}

uint64_t GradientSlot::captured_as() const {
  const MutexLock lock(mu_);
  return captured_as_;
}

at::Tensor GradientSlot::Wait(bool is_last) {
  HostCopy delivery;
  {
    const MutexLock lock(mu_);
    if (captured_as_ == 0) return at::Tensor();
    delivery = delivery_;
    if (is_last) delivery_ = HostCopy();
  }
  return is_last ? delivery.Wait() : delivery.Wait().clone();
}

// ----------------------------------------------------------------------------------- PendingLayers

PendingLayers::PendingLayers(const std::vector<std::string>& layers,
                             std::shared_ptr<const CaptureSink> sink,
                             std::map<size_t, PiecesByDevice> captured)
    : sink_(std::move(sink)), results_(layers.size()) {
  const bool is_error = sink_->options.unused_layers == UnusedLayers::kError;
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    const std::string& name = layers[layer];
    const auto first = std::find(layers.begin(), layers.end(), name) - layers.begin();
    first_of_name_.push_back(static_cast<size_t>(first));
    if (first_of_name_.back() != layer) continue;  // a duplicate name
    LayerResult& result = results_[layer];
    result.ran = captured.contains(layer);
    TORCH_CHECK(result.ran || !is_error, "layer \"", name,
                "\" was not called in forward: correct its name, or set "
                "LayerOptions::unused_layers to kZeros");
    if (!result.ran) continue;
    std::vector<LayerPieces>& devices = devices_[layer];
    devices = InDeviceOrder(name, std::move(captured[layer]));
    result.tensors.resize(devices.front().size());
    for (size_t i = 0; i < result.tensors.size(); ++i) {
      const LayerPart part = {layer, i};
      const uint64_t last_gradient = LastGradient(devices, i);
      TORCH_CHECK(devices.front()[i].gradient == nullptr || last_gradient > 0 || !is_error,
                  "the output does not depend on layer \"", name, "\", tensor ", i,
                  ": choose another layer or target, or set LayerOptions::unused_layers to "
                  "kZeros");
      MakeZeros(part);
      arrivals_.emplace_back(std::max(devices.back()[i].captured_as, last_gradient), part);
    }
  }
  std::sort(arrivals_.begin(), arrivals_.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
}

std::vector<LayerResult> PendingLayers::Wait() {
  for (const auto& [captured_as, part] : arrivals_) {
    LayerTensor& tensor = results_[part.layer].tensors[part.tensor];
    tensor = Gather(part);
    if (!sink_->callbacks.on_arrival) continue;
    const at::NoGradGuard no_grad;
    sink_->callbacks.on_arrival(part, tensor);
  }
  for (size_t layer = 0; layer < results_.size(); ++layer) {
    if (first_of_name_[layer] != layer) results_[layer] = results_[first_of_name_[layer]];
  }
  return std::move(results_);
}

std::vector<LayerPieces> PendingLayers::InDeviceOrder(const std::string& layer,
                                                      PiecesByDevice by_device) const {
  const size_t count = by_device.size();
  std::vector<LayerPieces> ordered;
  if (count == 1 || sink_->options.device_ids.empty()) {
    for (auto& [index, pieces] : by_device) ordered.push_back(std::move(pieces));
  } else {
    for (const int index : sink_->options.device_ids) {
      auto found = by_device.extract(index);
      if (!found.empty()) ordered.push_back(std::move(found.mapped()));
    }
    TORCH_CHECK(ordered.size() == count, "layer \"", layer, "\" ran on ", count,
                " devices, of which LayerOptions::device_ids names ", ordered.size(),
                ": name each device once");
  }
  for (const LayerPieces& pieces : ordered) {
    TORCH_CHECK(pieces.size() == ordered.front().size(), "layer \"", layer, "\" has ",
                ordered.front().size(), " tensors on one device and ", pieces.size(),
                " on another: its parts must be alike");
  }
  return ordered;
}

void PendingLayers::MakeZeros(LayerPart part) {
  for (LayerPieces& pieces : devices_[part.layer]) {
    LayerPiece& piece = pieces[part.tensor];
    if (piece.gradient == nullptr || piece.gradient->captured_as() > 0) continue;
    const c10::Device device =
        sink_->options.keep_on_device ? piece.options.device() : c10::Device(at::kCPU);
    piece.zeros = at::zeros(piece.sizes, piece.options.device(device));
    if (sink_->callbacks.output_function) {
      piece.zeros = sink_->callbacks.output_function(part, piece.zeros);
    }
  }
}

LayerTensor PendingLayers::Gather(LayerPart part) {
  LayerTensor result;
  std::vector<at::Tensor> activations, gradients;
  for (LayerPieces& pieces : devices_[part.layer]) {
    LayerPiece piece = std::exchange(pieces[part.tensor], {});
    if (sink_->options.activations) {
      activations.push_back(std::exchange(piece.activation, {}).Wait());
    }
    if (piece.gradient == nullptr) continue;
    const at::Tensor gradient = piece.gradient->Wait(/*is_last=*/piece.gradient.use_count() == 1);
    result.connected = result.connected || gradient.defined();
    gradients.push_back(gradient.defined() ? gradient : piece.zeros);
  }
  const auto join = [this](std::vector<at::Tensor>& pieces) {
    for (at::Tensor& piece : pieces) piece = piece.to(pieces.front().device());
    return sink_->copies->Concatenate(pieces);
  };
  if (!activations.empty()) result.activation = join(activations);
  if (!gradients.empty()) result.gradient = join(gradients);
  return result;
}

}  // namespace pinion
