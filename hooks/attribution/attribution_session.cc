#include "pinion/hooks/attribution/attribution_session.h"

#include <c10/util/Exception.h>

#include <cstddef>
#include <utility>

#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/hooks/attribution/host_copies.h"
#include "pinion/hooks/attribution/layer_pass.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/environment.h"
#include "pinion/hooks/tier/torch_tier.h"

namespace pinion {

absl::StatusOr<std::shared_ptr<AttributionSession>> AttributionSession::Create(
    const HostTierOptions& options, const DeviceBackend& backend) {
  PINION_ASSIGN_OR_RETURN(const c10::DeviceType type, DeviceTypeOf(backend.type_name));
  PINION_RETURN_IF_ERROR(backend.Validate());
  PINION_RETURN_IF_ERROR(options.allocator.Validate());
  PINION_RETURN_IF_ERROR(options.engine.Validate());
  std::shared_ptr<HostTier> tier;
  if (SwitchedOnByEnvironment("PINION_DISABLE")) {
    PINION_LOG(kWarning) << "attribution on " << backend.type_name
                         << " copies as LibTorch does: PINION_DISABLE=1 is in the environment";
  } else {
    WarnOfSwitches("attribution", backend.type_name, /*verifies=*/false);
    PINION_ASSIGN_OR_RETURN(tier, TorchHostTier(options, backend, type));
  }
  return std::make_shared<AttributionSession>(std::move(tier), type);
}

AttributionSession::AttributionSession(std::shared_ptr<HostTier> tier, c10::DeviceType type)
    : tier_(std::move(tier)), type_(type) {}

std::shared_ptr<HostCopies> AttributionSession::NewCopies() const {
  return std::make_shared<HostCopies>(tier_, type_);
}

std::vector<LayerResult> AttributionSession::ComputeLayerGradientsAndEval(
    const AttributedForward& forward, const std::vector<std::string>& layers,
    const std::vector<at::Tensor>& inputs, const Target& target, const LayerOptions& options,
    const LayerCallbacks& callbacks) {
  return StartGradients(NewCopies(), forward, layers, inputs, target, options, callbacks).Wait();
}

std::vector<LayerResult> AttributionSession::EvalLayers(const AttributedForward& forward,
                                                        const std::vector<std::string>& layers,
                                                        const std::vector<at::Tensor>& inputs,
                                                        const LayerOptions& options,
                                                        const LayerCallbacks& callbacks) {
  return StartValues(NewCopies(), forward, layers, inputs, options, callbacks).Wait();
}

at::Tensor AttributionSession::Concatenate(const std::vector<at::Tensor>& parts) const {
  TORCH_CHECK(!parts.empty(), "there are no tensors to concatenate: give one at least");
  for (size_t i = 0; i < parts.size(); ++i) {
    TORCH_CHECK(parts[i].defined(), "tensor ", i, " to concatenate is undefined: leave it out");
  }
  return NewCopies()->Concatenate(parts);
}

}  // namespace pinion
