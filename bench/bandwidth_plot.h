// Draws a bandwidth run: measured points and fitted curves.

#ifndef PINION_BENCH_BANDWIDTH_PLOT_H_
#define PINION_BENCH_BANDWIDTH_PLOT_H_

#include <string>

#include "absl/status/status.h"
#include "pinion/bench/bandwidth_result.h"

namespace pinion {

// Draws the sweeps of the first device with gnuplot. Leaves no partial file at `path`.
absl::Status WriteBandwidthPlot(const BandwidthResult& result, const std::string& path);

// Returns the gnuplot script, with data, that draws `output`. `terminal` is "svg" or "png".
std::string PlotScript(const BandwidthResult& result, const std::string& terminal,
                       const std::string& output);

}  // namespace pinion

#endif  // PINION_BENCH_BANDWIDTH_PLOT_H_
