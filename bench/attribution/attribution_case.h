// Calls of attribution methods on the emulated device, by Captum and by Pinion: memory, time,
// copies and values.
//
// Parameters require gradients, as after training. The target is one class of each example.
//
// Thread safety: none: each run registers an emulated machine of its own as "emu".

#ifndef PINION_BENCH_ATTRIBUTION_ATTRIBUTION_CASE_H_
#define PINION_BENCH_ATTRIBUTION_ATTRIBUTION_CASE_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "pinion/bench/attribution/attribution_table.h"
#include "pinion/bench/offload/offload_model.h"

namespace pinion {

// Attributes all blocks of the model in every way. Compares results with those of Captum's default.
// NotFound names all presets.
absl::StatusOr<std::vector<AttributionRow>> RunWays(const OffloadModel& model,
                                                    const std::string& preset);

// Returns whether paths are measured: for the float32 residual network, whose sums can be compared.
bool HasPaths(const OffloadModel& model);

// Runs methods along a path within a device budget, for one layer of a small residual network. A
// budget is Captum's peak for one batch of some steps. For more steps, Captum gets the largest
// internal_batch_size that fits. Pinion gets the budget alone. `quick` measures fewer steps.
// NotFound names all presets.
absl::StatusOr<std::vector<PathRow>> RunPaths(const OffloadModel& model, const std::string& preset,
                                              bool quick);

}  // namespace pinion

#endif  // PINION_BENCH_ATTRIBUTION_ATTRIBUTION_CASE_H_
