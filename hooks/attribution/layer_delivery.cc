#include "pinion/hooks/attribution/layer_delivery.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include "absl/cleanup/cleanup.h"

namespace pinion {

std::optional<LayerDelivery> LayerWay::Deliver(LayerPart part, const at::Tensor& tensor,
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
    source = HostCopies::Source::kStays;
  }
  LayerDelivery delivery;
  if (!options.keep_on_device) {
    delivery.copy = copies->Start(leaving, source);
  } else {
    delivery.kept = source == HostCopies::Source::kStays ? leaving : leaving.clone();
  }
  return delivery;
}

void LayerWay::Close() {
  MutexLock lock(mu_);
  is_closed_ = true;
  while (delivering_ > 0) delivered_.Wait(mu_);
}

at::Tensor GradientSlot::Take(const at::Tensor& gradient) {
  if (!gradient.defined()) return gradient;
  std::optional<LayerDelivery> delivery =
      way_->Deliver(part_, gradient, HostCopies::Source::kStays);
  if (!delivery.has_value()) return gradient;
  {
    const MutexLock lock(mu_);
    delivery_ = *std::move(delivery);
    captured_as_ = way_->NextNumber();
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
  LayerDelivery delivery;
  {
    const MutexLock lock(mu_);
    if (captured_as_ == 0) return at::Tensor();
    delivery = delivery_;
    if (is_last) delivery_ = LayerDelivery();
  }
  return is_last ? delivery.Wait() : delivery.Wait().clone();
}

}  // namespace pinion
