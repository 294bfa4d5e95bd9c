// Compares explaining pictures with Pinion and by hand.
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

// Repeats by hand what `pinion` did with `options`: without a limit, for peak and maps, then at the
// limit, where the emulated device may run out of memory. Returns a table. Errors: those of
// RunExplanation, except running out of memory.
absl::StatusOr<std::string> CompareWithByHand(ExplanationOptions options, DigitNet& net,
                                              const at::Tensor& pictures,
                                              const std::vector<int64_t>& classes,
                                              const ExplanationRun& pinion);

}  // namespace pinion

#endif  // PINION_EXAMPLES_COMPARE_BY_HAND_H_
