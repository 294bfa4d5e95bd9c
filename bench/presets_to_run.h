// The presets on which a benchmark runs.

#ifndef PINION_BENCH_PRESETS_TO_RUN_H_
#define PINION_BENCH_PRESETS_TO_RUN_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace pinion {

// Returns `asked`; else all presets, or for a quick run one with a slow and one with a fast link.
// NotFound lists the presets.
absl::StatusOr<std::vector<std::string>> PresetsToRun(std::vector<std::string> asked, bool quick);

}  // namespace pinion

#endif  // PINION_BENCH_PRESETS_TO_RUN_H_
