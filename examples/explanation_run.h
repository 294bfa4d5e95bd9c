// Explains pictures on an accelerator with a memory limit, and reports the cost.
//
// Thread safety: one thread; no tensor of the device is alive.

#ifndef PINION_EXAMPLES_EXPLANATION_RUN_H_
#define PINION_EXAMPLES_EXPLANATION_RUN_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "pinion/examples/digit_net.h"
#include "pinion/examples/explanation.h"

namespace pinion {

struct ExplanationOptions {
  bool with_pinion = true;
  int64_t steps = 0;  // of integrated gradients
  std::string device = "emu:0";
  // The emulated device's limit, and Pinion's budget on any device. UINT64_MAX: none.
  uint64_t memory_limit_bytes = UINT64_MAX;
};

struct ExplanationRun {
  Explanation explanation;
  uint64_t peak_bytes = 0;  // on the device, weights included
};

// `net` and `pictures` [count, 1, 64, 64] remain on the host. ResourceExhausted if the device runs
// out of memory: a line with the requested size, then the memory's owners. Cancelled after a signal
// (programs/command_line.h).
absl::StatusOr<ExplanationRun> RunExplanation(const ExplanationOptions& options, DigitNet& net,
                                              const at::Tensor& pictures,
                                              const std::vector<int64_t>& classes);

}  // namespace pinion

#endif  // PINION_EXAMPLES_EXPLANATION_RUN_H_
