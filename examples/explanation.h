// Explains a class of pictures by Grad-CAM of the network's last block and by integrated gradients,
// on an accelerator with a memory limit: with Pinion, and by hand for comparison.
//
// Thread safety: one thread; no tensor of the device is alive.

#ifndef PINION_EXAMPLES_EXPLANATION_H_
#define PINION_EXAMPLES_EXPLANATION_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "pinion/examples/digit_net.h"

namespace pinion {

struct ExplanationOptions {
  // False: LibTorch alone, like Captum by default. Values and gradients stay on the device, and all
  // steps are one batch.
  bool with_pinion = true;
  int64_t steps = 0;  // of integrated gradients
  std::string device = "emu:0";
  // The emulated device's limit, and Pinion's budget on any device. UINT64_MAX: none.
  uint64_t memory_limit_bytes = UINT64_MAX;
};

// Host tensors [count, 1, 64, 64], and what they cost.
struct Explanation {
  at::Tensor grad_cam;              // its positive part, interpolated to the picture's size
  at::Tensor integrated_gradients;  // from blank paper
  uint64_t peak_bytes = 0;          // on the device, weights included
};

// Explains `classes[i]` of each picture. `net` and `pictures` [count, 1, 64, 64] remain on the
// host. ResourceExhausted if the device runs out of memory: a line with the requested size, then
// the memory's owners. Cancelled after a signal (programs/command_line.h). c10::Error for the rest.
absl::StatusOr<Explanation> Explain(const ExplanationOptions& options, const DigitNet& net,
                                    const at::Tensor& pictures,
                                    const std::vector<int64_t>& classes);

// Repeats by hand what `pinion` did with `options`: without a limit, for peak and maps, then at the
// limit, where the emulated device may run out of memory. Returns a table. Errors: those of
// Explain, except running out of memory.
absl::StatusOr<std::string> CompareWithByHand(ExplanationOptions options, const DigitNet& net,
                                              const at::Tensor& pictures,
                                              const std::vector<int64_t>& classes,
                                              const Explanation& pinion);

}  // namespace pinion

#endif  // PINION_EXAMPLES_EXPLANATION_H_
