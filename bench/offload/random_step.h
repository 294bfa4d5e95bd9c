// Step records of any length for tests of planners: drawn from a seed, or shaped like a GPT's.
//
//   StepTrace step = RandomStep(seed, /*shrink=*/1);    // of 4 to 33 operators
//   StepTrace step = RandomStepOfUses(seed, 5000);
//   StepTrace step = GptLikeStep(5000, 4 * kMiB);
//
// Thread safety: pure functions.

#ifndef PINION_BENCH_OFFLOAD_RANDOM_STEP_H_
#define PINION_BENCH_OFFLOAD_RANDOM_STEP_H_

#include <cstddef>
#include <cstdint>

#include "pinion/engine/planner/step_trace.h"

namespace pinion {

// A forward of operators that save what they make and, at times, what others have made, and a
// backward that leaves some of them out. Tensors of up to 2 MiB; those and the compute are shrunk
// by that factor, but never below what is offloaded at all.
StepTrace RandomStep(uint64_t seed, uint64_t shrink);
// The same, with as many operators as it takes for that many saves and reads, or some more.
StepTrace RandomStepOfUses(uint64_t seed, size_t uses);

// Layers of attention and a wide part behind it, each with norms: what they save, in proportion,
// and how long they compute. Backward reads all of it. `unit_bytes` is a tensor of one layer's
// width for each token; compute is in proportion to it.
StepTrace GptLikeStep(size_t uses, uint64_t unit_bytes);

}  // namespace pinion

#endif  // PINION_BENCH_OFFLOAD_RANDOM_STEP_H_
