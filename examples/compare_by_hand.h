// What explaining pictures takes with Pinion and by hand, side by side.
//
// Thread safety: as explanation_run.h.

#ifndef PINION_EXAMPLES_COMPARE_BY_HAND_H_
#define PINION_EXAMPLES_COMPARE_BY_HAND_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "pinion/examples/digit_net.h"
#include "pinion/examples/explanation_run.h"

namespace pinion {

// Does what `pinion` has done with `options` by hand: without a limit for its peak and its maps,
// then at the limit, where the emulated device may run out of memory. A table for people. Errors as
// those of RunExplanation, but for that one.
absl::StatusOr<std::string> CompareWithByHand(ExplanationOptions options, DigitNet& net,
                                              const at::Tensor& pictures,
                                              const std::vector<int64_t>& classes,
                                              const ExplanationRun& pinion);

}  // namespace pinion

#endif  // PINION_EXAMPLES_COMPARE_BY_HAND_H_
