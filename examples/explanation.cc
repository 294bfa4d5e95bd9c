#include "pinion/examples/explanation.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/upsample_bilinear2d.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cstddef>
#include <exception>
#include <limits>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/device/allocation_label.h"
#include "pinion/examples/digit_pictures.h"
#include "pinion/hooks/attribution/attribution_session.h"
#include "pinion/hooks/attribution/layer_methods.h"
#include "pinion/hooks/attribution/path_methods.h"
#include "pinion/hooks/attribution/target.h"
#include "pinion/programs/accelerator.h"
#include "pinion/programs/command_line.h"
#include "pinion/programs/run_options.h"

namespace pinion {
namespace {

class StoppedBySignal : public std::exception {};

// Takes as many `steps` at a time as fit in `device_budget_bytes`, which bounds all memory of the
// device's allocator; 0: all.
Explanation ExplainWithPinion(AttributionSession& session, DigitNet& net,
                              const at::Tensor& pictures, const std::vector<int64_t>& classes,
                              int64_t steps, uint64_t device_budget_bytes) {
  const auto forward = [&](const std::vector<at::Tensor>& in) {
    if (StopSignal() != 0) throw StoppedBySignal();
    return net->forward(in[0]);
  };
  const Target target = Target::PerExample(classes);

  const std::vector<LayerAttribution> maps = LayerGradCam(
      session, forward, {kLastDigitBlock}, {pictures}, target, {}, {.relu_attributions = true});
  PathOptions path;
  path.n_steps = steps;
  path.device_budget_bytes = device_budget_bytes;
  const std::vector<at::Tensor> gradients =
      IntegratedGradients(session, forward, {pictures}, target, path);
  return {Interpolate(maps[0].tensors[0], {kPictureSide}, torch::kBilinear), gradients[0]};
}

// Returns the gradient of the sum of each picture's score of its class.
at::Tensor GradientOf(const at::Tensor& scores, const std::vector<int64_t>& classes,
                      const at::Tensor& input) {
  const at::Tensor column = at::tensor(classes, scores.options().dtype(at::kLong)).unsqueeze(1);
  return torch::autograd::grad({scores.gather(1, column).sum()}, {input}).front();
}

at::Tensor GradCamByHand(DigitNet& net, const at::Tensor& pictures,
                         const std::vector<int64_t>& classes) {
  const at::Tensor block = net->LastBlock(pictures);
  const at::Tensor gradient = GradientOf(net->Scores(block), classes, block);
  const at::Tensor map =
      (gradient.mean({2, 3}, /*keepdim=*/true) * block).sum(1, /*keepdim=*/true).relu();
  return at::upsample_bilinear2d(map.detach().cpu(), {kPictureSide, kPictureSide},
                                 /*align_corners=*/false);
}

at::Tensor IntegratedGradientsByHand(DigitNet& net, const at::Tensor& pictures,
                                     const std::vector<int64_t>& classes, int64_t steps) {
  const PathPoints path = PointsOf(Quadrature::kGaussLegendre, steps);
  const auto column = [&](const std::vector<double>& numbers) {
    return at::tensor(numbers, pictures.options()).view({-1, 1, 1, 1, 1});
  };
  std::vector<int64_t> classes_of_rows;
  for (int64_t step = 0; step < steps; ++step) {
    classes_of_rows.insert(classes_of_rows.end(), classes.begin(), classes.end());
  }
  const at::Tensor batch = (column(path.alphas) * pictures).flatten(0, 1).requires_grad_();
  const at::Tensor gradients = GradientOf(net->forward(batch), classes_of_rows, batch);
  const at::Tensor mean =
      (column(path.weights) * gradients.unflatten(0, {steps, pictures.size(0)})).sum(0);
  return (pictures * mean).cpu();
}

absl::StatusOr<Explanation> ExplainOn(const Accelerator& accelerator, uint64_t held_bytes,
                                      const ExplanationOptions& options, const DigitNet& on_host,
                                      const at::Tensor& pictures_on_host,
                                      const std::vector<int64_t>& classes) {
  DigitNet net = nullptr;
  {
    const AllocationLabel label("parameters");
    net = DigitNet(std::static_pointer_cast<DigitNetImpl>(on_host->clone(accelerator.device())));
  }
  const at::Tensor pictures = pictures_on_host.to(accelerator.device());
  if (!options.with_pinion) {
    return Explanation{GradCamByHand(net, pictures, classes),
                       IntegratedGradientsByHand(net, pictures, classes, options.steps)};
  }
  PINION_ASSIGN_OR_RETURN(
      const std::shared_ptr<AttributionSession> session,
      AttributionSession::Create(accelerator.tier_options(), accelerator.backend()));
  const uint64_t limit_bytes = options.memory_limit_bytes;
  return ExplainWithPinion(*session, net, pictures, classes, options.steps,
                           limit_bytes == UINT64_MAX ? 0 : held_bytes + limit_bytes);
}

// Returns the largest difference relative to the largest value.
double Difference(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor largest = b.abs().max().clamp_min(std::numeric_limits<float>::min());
  return ((a - b).abs().max() / largest).item<double>();
}

// Extracts "asked for 6.25 MiB, in use 11 MiB of 12 MiB" from the emulated device's report.
std::string WhatWasAsked(const absl::Status& out_of_memory) {
  const absl::string_view message = out_of_memory.message();
  const size_t begin = std::min(message.find("asked for"), message.size());
  return std::string(message.substr(begin, message.find(". Held by") - begin));
}

}  // namespace

absl::StatusOr<Explanation> Explain(const ExplanationOptions& options, const DigitNet& net,
                                    const at::Tensor& pictures,
                                    const std::vector<int64_t>& classes) {
  RunOptions run;
  run.device = options.device;
  run.device_memory_bytes = options.memory_limit_bytes;
  try {
    PINION_ASSIGN_OR_RETURN(const Accelerator accelerator, Accelerator::Open(run));
    // The GPU already holds cuBLAS's workspace from training. The limit applies to the rest.
    const uint64_t held_bytes = accelerator.peak_bytes();
    PINION_ASSIGN_OR_RETURN(Explanation explanation,
                            ExplainOn(accelerator, held_bytes, options, net, pictures, classes));
    explanation.peak_bytes = accelerator.peak_bytes() - held_bytes;
    return explanation;
  } catch (const StoppedBySignal&) {
    return absl::CancelledError("stopped by a signal");
  } catch (const c10::OutOfMemoryError& error) {
    return absl::ResourceExhaustedError(error.what_without_backtrace());
  }
}

absl::StatusOr<std::string> CompareWithByHand(ExplanationOptions options, const DigitNet& net,
                                              const at::Tensor& pictures,
                                              const std::vector<int64_t>& classes,
                                              const Explanation& pinion) {
  const uint64_t limit_bytes = std::exchange(options.memory_limit_bytes, UINT64_MAX);
  options.with_pinion = false;
  PINION_ASSIGN_OR_RETURN(const Explanation by_hand, Explain(options, net, pictures, classes));
  std::string fits = "fits", verdict = "fits";
  if (limit_bytes == UINT64_MAX) {
    fits = verdict = "no limit";
  } else if (!absl::StartsWith(options.device, "emu:")) {
    // A CUDA device does not enforce the limit.
    if (pinion.peak_bytes > limit_bytes) fits = "more than the limit";
    if (by_hand.peak_bytes > limit_bytes) verdict = "more than the limit";
  } else {
    options.memory_limit_bytes = limit_bytes;
    const absl::Status status = Explain(options, net, pictures, classes).status();
    if (!status.ok() && !absl::IsResourceExhausted(status)) return status;
    if (!status.ok()) verdict = "out of memory: " + WhatWasAsked(status);
  }
  return absl::StrCat(
      absl::StrFormat("memory   with Pinion     peak %8s   %s\n", HumanBytes(pinion.peak_bytes),
                      fits),
      absl::StrFormat("         without Pinion  peak %8s   %s\n", HumanBytes(by_hand.peak_bytes),
                      verdict),
      absl::StrFormat("maps     the same both ways, but for %.0e (Grad-CAM) and %.0e (integrated "
                      "gradients) of their largest value\n",
                      Difference(pinion.grad_cam, by_hand.grad_cam),
                      Difference(pinion.integrated_gradients, by_hand.integrated_gradients)));
}

}  // namespace pinion
