// Parses --models, --presets and --quick of benchmarks of OffloadModels.

#ifndef PINION_BENCH_OFFLOAD_MODELS_TO_RUN_H_
#define PINION_BENCH_OFFLOAD_MODELS_TO_RUN_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "pinion/bench/offload/offload_model.h"

namespace pinion {

struct ModelsToRun {
  std::vector<OffloadModel> models;  // with --quick the first alone
  std::vector<std::string> presets;  // presets_to_run.h
};

// Errors: those of FindOffloadModels and PresetsToRun.
absl::StatusOr<ModelsToRun> FindModelsToRun(const std::vector<std::string>& models,
                                            const std::vector<std::string>& presets, bool quick);

}  // namespace pinion

#endif  // PINION_BENCH_OFFLOAD_MODELS_TO_RUN_H_
