// A bandwidth run as a picture: what was measured as points, the fitted curves as lines.

#ifndef PINION_BENCH_BANDWIDTH_PLOT_H_
#define PINION_BENCH_BANDWIDTH_PLOT_H_

#include <string>

#include "absl/status/status.h"
#include "pinion/bench/bandwidth_result.h"

namespace pinion {

// The sweeps of the first device, by gnuplot. Leaves nothing half-drawn at `path`.
absl::Status WriteBandwidthPlot(const BandwidthResult& result, const std::string& path);

// What gnuplot is told to draw `output` with, data included. `terminal` is "svg" or "png".
std::string PlotScript(const BandwidthResult& result, const std::string& terminal,
                       const std::string& output);

}  // namespace pinion

#endif  // PINION_BENCH_BANDWIDTH_PLOT_H_
