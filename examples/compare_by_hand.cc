#include "pinion/examples/compare_by_hand.h"

#include <ATen/TensorOperators.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/examples/digit_net.h"
#include "pinion/examples/explanation_run.h"

namespace pinion {
namespace {

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

absl::StatusOr<std::string> CompareWithByHand(ExplanationOptions options, DigitNet& net,
                                              const at::Tensor& pictures,
                                              const std::vector<int64_t>& classes,
                                              const ExplanationRun& pinion) {
  const uint64_t limit_bytes = std::exchange(options.memory_limit_bytes, UINT64_MAX);
  options.with_pinion = false;
  PINION_ASSIGN_OR_RETURN(const ExplanationRun by_hand,
                          RunExplanation(options, net, pictures, classes));
  std::string fits = "fits", verdict = "fits";
  if (limit_bytes == UINT64_MAX) {
    fits = verdict = "no limit";
  } else if (!absl::StartsWith(options.device, "emu:")) {
    // A CUDA device does not enforce the limit.
    if (pinion.peak_bytes > limit_bytes) fits = "more than the limit";
    if (by_hand.peak_bytes > limit_bytes) verdict = "more than the limit";
  } else {
    options.memory_limit_bytes = limit_bytes;
    const absl::Status status = RunExplanation(options, net, pictures, classes).status();
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
                      Difference(pinion.explanation.grad_cam, by_hand.explanation.grad_cam),
                      Difference(pinion.explanation.integrated_gradients,
                                 by_hand.explanation.integrated_gradients)));
}

}  // namespace pinion
