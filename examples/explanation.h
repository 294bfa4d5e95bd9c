// What in a picture speaks for a class, asked in two ways at once: Grad-CAM of the network's last
// block, and integrated gradients. Once with Pinion, and once as one writes it by hand, to compare.
//
// Thread safety: one thread for a network.
// Errors: c10::Error; c10::OutOfMemoryError where the device's memory does not suffice.

#ifndef PINION_EXAMPLES_EXPLANATION_H_
#define PINION_EXAMPLES_EXPLANATION_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <vector>

#include "pinion/examples/digit_net.h"
#include "pinion/hooks/attribution/attribution_session.h"

namespace pinion {

struct ExplainedPictures {
  at::Tensor pictures;           // [count, 1, 64, 64], on the network's device
  std::vector<int64_t> classes;  // of each picture, the one that is explained
};

// On the host, [count, 1, 64, 64].
struct Explanation {
  at::Tensor grad_cam;              // its positive part, interpolated to the picture's size
  at::Tensor integrated_gradients;  // on the way from paper without ink
};

// Thrown by ExplainWithPinion when a signal has come (programs/command_line.h).
class StoppedBySignal : public std::exception {};

// Takes as many of the `steps` at a time as fit into `device_budget_bytes` of device memory, which
// bounds all that the device's allocator holds; 0: all.
Explanation ExplainWithPinion(AttributionSession& session, DigitNet& net,
                              const ExplainedPictures& explained, int64_t steps,
                              uint64_t device_budget_bytes);

// With LibTorch alone, and as Captum does it unless told otherwise: the block's value and gradient
// stay on the device, and all steps are one batch there.
Explanation ExplainByHand(DigitNet& net, const ExplainedPictures& explained, int64_t steps);

}  // namespace pinion

#endif  // PINION_EXAMPLES_EXPLANATION_H_
