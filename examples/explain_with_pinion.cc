#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "pinion/examples/digit_net.h"
#include "pinion/examples/explanation.h"
#include "pinion/hooks/attribution/attribution_session.h"
#include "pinion/hooks/attribution/layer_methods.h"
#include "pinion/hooks/attribution/path_methods.h"
#include "pinion/hooks/attribution/target.h"
#include "pinion/programs/command_line.h"

namespace pinion {

Explanation ExplainWithPinion(AttributionSession& session, DigitNet& net,
                              const ExplainedPictures& explained, int64_t steps,
                              uint64_t device_budget_bytes) {
  const auto forward = [&](const std::vector<at::Tensor>& in) {
    if (StopSignal() != 0) throw StoppedBySignal();
    return net->forward(in[0]);
  };
  const Target target = Target::PerExample(explained.classes);

  const std::vector<LayerAttribution> maps =
      LayerGradCam(session, forward, {kLastDigitBlock}, {explained.pictures}, target, {},
                   {.relu_attributions = true});
  PathOptions path;
  path.n_steps = steps;
  path.device_budget_bytes = device_budget_bytes;
  const std::vector<at::Tensor> gradients =
      IntegratedGradients(session, forward, {explained.pictures}, target, path);
  return {Interpolate(maps[0].tensors[0], {kDigitNetSide}, torch::kBilinear), gradients[0]};
}

}  // namespace pinion
