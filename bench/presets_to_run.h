// The presets of the emulated device that a benchmark runs on.

#ifndef PINION_BENCH_PRESETS_TO_RUN_H_
#define PINION_BENCH_PRESETS_TO_RUN_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace pinion {

// Those that were asked for; else all, or of a quick run one whose link is slow and one whose is
// fast. NotFound names all.
absl::StatusOr<std::vector<std::string>> PresetsToRun(std::vector<std::string> asked, bool quick);

}  // namespace pinion

#endif  // PINION_BENCH_PRESETS_TO_RUN_H_
