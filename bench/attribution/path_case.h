// Measures methods along a path within a device budget, by Captum and by Pinion, on the emulated
// device: one layer of a small residual network.
//
//   PINION_ASSIGN_OR_RETURN(const std::vector<PathRow> rows, RunPaths(model, "a100_pcie4", quick));
//
// A budget is Captum's peak for one batch of some steps. For more steps, Captum gets the largest
// internal_batch_size that fits. Pinion gets the budget alone.
//
// Thread safety: none: each run registers an emulated machine of its own as "emu".

#ifndef PINION_BENCH_ATTRIBUTION_PATH_CASE_H_
#define PINION_BENCH_ATTRIBUTION_PATH_CASE_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "pinion/bench/attribution/path_table.h"
#include "pinion/bench/offload/offload_model.h"

namespace pinion {

// Returns whether paths are measured: for the float32 residual network, whose sums can be compared.
bool HasPaths(const OffloadModel& model);

// `quick` measures fewer steps. NotFound names all presets.
absl::StatusOr<std::vector<PathRow>> RunPaths(const OffloadModel& model, const std::string& preset,
                                              bool quick);

}  // namespace pinion

#endif  // PINION_BENCH_ATTRIBUTION_PATH_CASE_H_
