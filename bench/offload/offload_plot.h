// Draws an offload_bench run: step time over device peak, for each model and preset.

#ifndef PINION_BENCH_OFFLOAD_OFFLOAD_PLOT_H_
#define PINION_BENCH_OFFLOAD_OFFLOAD_PLOT_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "pinion/bench/offload/offload_table.h"

namespace pinion {

// Draws with gnuplot (bench/gnuplot.h).
absl::Status WriteOffloadPlot(const std::vector<OffloadRow>& rows, const std::string& path);

// Returns the gnuplot script, with data, that draws `output`. `terminal` is "svg" or "png".
std::string OffloadPlotScript(const std::vector<OffloadRow>& rows, const std::string& terminal,
                              const std::string& output);

}  // namespace pinion

#endif  // PINION_BENCH_OFFLOAD_OFFLOAD_PLOT_H_
