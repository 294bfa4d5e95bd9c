#include "pinion/bench/bandwidth_plot.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/bench/bandwidth_text.h"
#include "pinion/bench/gnuplot.h"

namespace pinion {
namespace {

// Colours (Wong's palette, safe for colour-blind readers) are directions; dashes and points are
// kinds.
constexpr const char* kH2dColour = "#0072B2";
constexpr const char* kD2hColour = "#D55E00";
constexpr int kPointTypes[] = {7, 5, 6, 9, 12, 4, 8};  // gnuplot's
constexpr int kPointTypeCount = sizeof(kPointTypes) / sizeof(kPointTypes[0]);

struct Line {
  std::string label;
  const Series* series;
  const char* colour;
  int kind;  // the same for both directions
};

std::vector<Line> LinesOf(const BandwidthResult& result) {
  std::vector<Line> lines;
  for (const CopyDirection direction :
       {CopyDirection::kHostToDevice, CopyDirection::kDeviceToHost}) {
    const bool h2d = direction == CopyDirection::kHostToDevice;
    int kind = 0;
    for (const CaseResult& of_case : result.cases) {
      if (of_case.latency) continue;
      for (const Series& series : of_case.series) {
        if (series.column != 0 || series.direction != direction || series.points.size() < 2) {
          continue;
        }
        lines.push_back(
            {SeriesLabel(of_case, series), &series, h2d ? kH2dColour : kD2hColour, kind++});
      }
    }
  }
  return lines;
}

std::string SizeTics() {
  std::string tics;
  for (uint64_t size = 4 * kKiB; size <= 16 * kGiB; size *= 4) {
    absl::StrAppendFormat(&tics, "%s\"%s\" %d", tics.empty() ? "" : ", ", HumanBytes(size), size);
  }
  return tics;
}

}  // namespace

std::string PlotScript(const BandwidthResult& result, const std::string& terminal,
                       const std::string& output) {
  const std::vector<Line> lines = LinesOf(result);
  const DeviceResult& device = result.devices.front();
  uint64_t smallest = UINT64_MAX;
  uint64_t largest = 0;
  for (const Line& line : lines) {
    smallest = std::min(smallest, line.series->points.front().size_bytes);
    largest = std::max(largest, line.series->largest().size_bytes);
  }
  std::string script = terminal == "png"
                           ? "set terminal pngcairo noenhanced size 1200,720 font 'sans,13'\n"
                           : "set terminal svg noenhanced size 1000,600 dynamic font 'sans,13' "
                             "background '#ffffff'\n";
  absl::StrAppend(&script, "set output ", GnuplotQuoted(output), "\n");
  absl::StrAppendFormat(
      &script, "set title %s\n",
      GnuplotQuoted(absl::StrCat("Copies between host and device: ", device.info.model)));
  absl::StrAppendFormat(&script,
                        "set xlabel 'size of a copy'\n"
                        "set ylabel 'GB/s%s'\n"
                        "set logscale x 4\n"
                        "set xtics (%s)\n"
                        "set xrange [%d:%d]\n"
                        "set yrange [0:*]\n"
                        "set grid lc rgb '#dddddd' lt 1\n"
                        "set border 3 lc rgb '#666666'\n"
                        "set tics nomirror\n"
                        "set key outside right top Left reverse spacing 1.4 samplen 2\n",
                        result.modelled ? " (modelled)" : "", SizeTics(), smallest * 3 / 4,
                        largest * 4 / 3);
  std::string plot;
  const auto add = [&plot](const std::string& what) {
    absl::StrAppend(&plot, plot.empty() ? "" : ", \\\n  ", what);
  };
  for (size_t i = 0; i < lines.size(); ++i) {
    const auto& [label, series, colour, kind] = lines[i];
    const int point_type = kPointTypes[kind % kPointTypeCount];
    const std::string pen = absl::StrFormat("lw 2 dt %d lc rgb '%s'", kind + 1, colour);
    absl::StrAppendFormat(&script, "$points%d << EOD\n", i);
    for (const SizePoint& point : series->points) {
      absl::StrAppendFormat(&script, "%d %.6g %.6g %.6g\n", point.size_bytes, point.gb_per_s(),
                            point.p5_gb_per_s(), point.p95_gb_per_s());
    }
    script += "EOD\n";
    if (series->curve.has_value()) {
      add(absl::StrFormat("[%d:%d] x / (%.9g + x / %.9g) * 1e-3 with lines %s notitle",
                          series->points.front().size_bytes, series->largest().size_bytes,
                          series->curve->fixed_us, series->curve->gb_per_s * 1e3, pen));
    }
    add(
        absl::StrFormat("$points%d using 1:2:3:4 with yerrorbars pt %d ps 0.8 lw 1.5 lc rgb '%s' "
                        "notitle",
                        i, point_type, colour));
    add(absl::StrFormat("keyentry with linespoints pt %d ps 0.8 %s title %s", point_type, pen,
                        GnuplotQuoted(label)));
  }
  return absl::StrCat(script, "plot sample ", plot, "\n");
}

absl::Status WriteBandwidthPlot(const BandwidthResult& result, const std::string& path) {
  if (LinesOf(result).empty()) {
    return absl::FailedPreconditionError("there is nothing to plot: no case has several sizes");
  }
  return DrawWithGnuplot(path, [&](const std::string& terminal, const std::string& output) {
    return PlotScript(result, terminal, output);
  });
}

}  // namespace pinion
