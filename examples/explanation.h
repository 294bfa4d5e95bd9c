// Explains a class of pictures by Grad-CAM of the network's last block and by integrated gradients:
// with Pinion, and by hand for comparison.
//
// Thread safety: one thread for a network.
// Errors: c10::Error; c10::OutOfMemoryError if the device runs out of memory.

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
  std::vector<int64_t> classes;  // the explained class of each picture
};

// Host tensors [count, 1, 64, 64].
struct Explanation {
  at::Tensor grad_cam;              // its positive part, interpolated to the picture's size
  at::Tensor integrated_gradients;  // from blank paper
};

// Thrown by ExplainWithPinion after a signal (programs/command_line.h).
class StoppedBySignal : public std::exception {};

// Takes as many `steps` at a time as fit in `device_budget_bytes`, which bounds all memory of the
// device's allocator; 0: all.
Explanation ExplainWithPinion(AttributionSession& session, DigitNet& net,
                              const ExplainedPictures& explained, int64_t steps,
                              uint64_t device_budget_bytes);

// Uses LibTorch alone, like Captum by default: values and gradients stay on the device, and all
// steps are one batch.
Explanation ExplainByHand(DigitNet& net, const ExplainedPictures& explained, int64_t steps);

}  // namespace pinion

#endif  // PINION_EXAMPLES_EXPLANATION_H_
