#include "pinion/bench/presets_to_run.h"

#include "pinion/allocator/base/status_macros.h"
#include "pinion/device/emulated/cost_model.h"

namespace pinion {

absl::StatusOr<std::vector<std::string>> PresetsToRun(std::vector<std::string> asked, bool quick) {
  if (asked.empty() && quick) return std::vector<std::string>{"a100_pcie4", "gh200_c2c"};
  if (asked.empty()) return PresetNames();
  for (const std::string& preset : asked) PINION_RETURN_IF_ERROR(FindPreset(preset).status());
  return asked;
}

}  // namespace pinion
