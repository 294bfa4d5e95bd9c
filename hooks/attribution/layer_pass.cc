#include "pinion/hooks/attribution/layer_pass.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include "pinion/hooks/attribution/layer_capture.h"
#include "pinion/hooks/attribution/tap.h"

namespace pinion {

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
