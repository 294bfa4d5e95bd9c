// Step records of any length for tests of planners: drawn from a seed, or shaped like a GPT's.
//
//   StepRecord step = RandomStep(seed, /*shrink=*/1);    // of 4 to 33 operators
//   StepRecord step = RandomStepOfUses(seed, 5000);
//   StepRecord step = GptLikeStep(5000, 4 * kMiB);
//
// Thread safety: pure functions.

#ifndef PINION_BENCH_OFFLOAD_RANDOM_STEP_H_
#define PINION_BENCH_OFFLOAD_RANDOM_STEP_H_

#include <cstddef>
#include <cstdint>

#include "pinion/engine/plan/step_record.h"

namespace pinion {

// Draws a forward whose operators save their own and earlier tensors, and a backward that skips
// some. Tensors have up to 2 MiB. `shrink` divides sizes and compute, but not below the least
// offloaded size.
StepRecord RandomStep(uint64_t seed, uint64_t shrink);
// Draws enough operators for at least `uses` saves and reads.
StepRecord RandomStepOfUses(uint64_t seed, size_t uses);

// Returns transformer layers with the sizes and compute of their saves in proportion. Backward
// reads every tensor. `unit_bytes` is one layer width for each token; compute scales with it.
StepRecord GptLikeStep(size_t uses, uint64_t unit_bytes);

}  // namespace pinion

#endif  // PINION_BENCH_OFFLOAD_RANDOM_STEP_H_
