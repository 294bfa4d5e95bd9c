#include "pinion/bench/offload/models_to_run.h"

#include "pinion/allocator/base/status_macros.h"
#include "pinion/bench/presets_to_run.h"

namespace pinion {

absl::StatusOr<ModelsToRun> FindModelsToRun(const std::vector<std::string>& models,
                                            const std::vector<std::string>& presets, bool quick) {
  ModelsToRun run;
  PINION_ASSIGN_OR_RETURN(run.presets, PresetsToRun(presets, quick));
  PINION_ASSIGN_OR_RETURN(run.models, FindOffloadModels(models));
  if (quick) run.models.resize(1);
  return run;
}

}  // namespace pinion
