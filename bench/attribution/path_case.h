// Methods along a path within a budget for device memory, Captum's way and Pinion's, of one layer
// of a small residual network and a few pictures, on the emulated device.
//
//   PINION_ASSIGN_OR_RETURN(const std::vector<PathRow> rows, RunPaths(model, "a100_pcie4", quick));
//
// A budget is what Captum takes for one batch of some steps: for more steps, Captum is given the
// internal_batch_size that just fits it, which its user has to guess, and Pinion the budget alone.
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

// The residual network in float32 has floating-point inputs and sums that can be compared.
bool HasPaths(const OffloadModel& model);

// Of a quick run fewer steps. NotFound names all presets.
absl::StatusOr<std::vector<PathRow>> RunPaths(const OffloadModel& model, const std::string& preset,
                                              bool quick);

}  // namespace pinion

#endif  // PINION_BENCH_ATTRIBUTION_PATH_CASE_H_
