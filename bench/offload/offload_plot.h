// An offload_bench run as a picture: for each model on each preset, the step's time over the
// device's peak.

#ifndef PINION_BENCH_OFFLOAD_OFFLOAD_PLOT_H_
#define PINION_BENCH_OFFLOAD_OFFLOAD_PLOT_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "pinion/bench/offload/offload_table.h"

namespace pinion {

// By gnuplot (bench/gnuplot.h).
absl::Status WriteOffloadPlot(const std::vector<OffloadRow>& rows, const std::string& path);

// What gnuplot is told to draw `output` with, data included. `terminal` is "svg" or "png".
std::string OffloadPlotScript(const std::vector<OffloadRow>& rows, const std::string& terminal,
                              const std::string& output);

}  // namespace pinion

#endif  // PINION_BENCH_OFFLOAD_OFFLOAD_PLOT_H_
