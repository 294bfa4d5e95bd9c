// What --models, --presets and --quick of a benchmark of OffloadModels ask for.

#ifndef PINION_BENCH_OFFLOAD_MODELS_TO_RUN_H_
#define PINION_BENCH_OFFLOAD_MODELS_TO_RUN_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "pinion/bench/offload/offload_model.h"

namespace pinion {

struct ModelsToRun {
  std::vector<OffloadModel> models;  // of a quick run the first one alone
  std::vector<std::string> presets;  // presets_to_run.h
};

// Errors as those of FindOffloadModels and PresetsToRun.
absl::StatusOr<ModelsToRun> FindModelsToRun(const std::vector<std::string>& models,
                                            const std::vector<std::string>& presets, bool quick);

}  // namespace pinion

#endif  // PINION_BENCH_OFFLOAD_MODELS_TO_RUN_H_
