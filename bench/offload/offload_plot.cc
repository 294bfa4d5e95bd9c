#include "pinion/bench/offload/offload_plot.h"

#include <algorithm>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/bench/gnuplot.h"

namespace pinion {
namespace {

using Kind = OffloadMethod::Kind;

constexpr int kPanelWidth = 300;
constexpr int kPanelHeight = 230;
constexpr int kKeyHeight = 40;
constexpr int kKeyWidth = 900;

// A colour of Wong's palette, safe for colour-blind readers, and a point of gnuplot's.
struct Look {
  Kind kind;
  const char* colour;
  int point;
};
constexpr Look kLooks[] = {{Kind::kNone, "#000000", 3},
                           {Kind::kBlocking, "#999999", 9},
                           {Kind::kTrl, "#D55E00", 5},
                           {Kind::kWindows, "#56B4E9", 6},
                           {Kind::kPlanned, "#0072B2", 7},
                           {Kind::kCheckpoint, "#000000", 11},
                           {Kind::kTrlCheckpoint, "#D55E00", 4},
                           {Kind::kPlannedRecompute, "#CC79A7", 7}};

struct Point {
  double mib = 0;
  double bound = 0;  // times the step without offload
  double step = 0;
  std::optional<double> offline;
};

std::vector<std::string> NamesOf(const std::vector<OffloadRow>& rows,
                                 std::string OffloadRow::*name) {
  std::vector<std::string> names;
  for (const OffloadRow& row : rows) {
    if (std::find(names.begin(), names.end(), row.*name) == names.end()) names.push_back(row.*name);
  }
  return names;
}

// Returns points sorted by memory.
std::vector<Point> PointsOf(const std::vector<OffloadRow>& rows, const std::string& model,
                            const std::string& preset, Kind kind) {
  std::vector<Point> points;
  for (const OffloadRow& row : rows) {
    if (row.model != model || row.preset != preset || row.method.kind != kind) continue;
    const uint64_t bytes = row.method.has_target() ? row.method.bytes : row.cost.peak_bytes;
    Point& point = points.emplace_back();
    point = {static_cast<double>(bytes) / kMiB, row.bound_us / row.alone_us,
             row.cost.step_us / row.alone_us, std::nullopt};
    if (row.offline_us.has_value()) point.offline = *row.offline_us / row.alone_us;
  }
  std::sort(points.begin(), points.end(),
            [](const Point& a, const Point& b) { return a.mib < b.mib; });
  return points;
}

std::string Panel(const std::vector<OffloadRow>& rows, const std::string& model,
                  const std::string& preset) {
  std::string script =
      absl::StrCat("set title ", GnuplotQuoted(absl::StrCat(model, ", ", preset)), "\n");
  std::string plot;
  for (const Look& look : kLooks) {
    const std::vector<Point> points = PointsOf(rows, model, preset, look.kind);
    if (points.empty()) continue;
    const std::string name = absl::StrCat("$of", static_cast<int>(look.kind));
    absl::StrAppend(&script, name, " << EOD\n");
    for (const Point& point : points) {
      absl::StrAppendFormat(
          &script, "%.6g %.6g %.6g %s\n", point.mib, point.step, point.bound,
          point.offline.has_value() ? absl::StrFormat("%.6g", *point.offline) : "NaN");
    }
    script += "EOD\n";
    const bool has_target = OffloadMethod{look.kind}.has_target();
    absl::StrAppendFormat(&plot, "%s%s using 1:2 with %s pt %d ps 0.6 lw 1.5 lc rgb '%s'",
                          plot.empty() ? "" : ", \\\n  ", name,
                          has_target ? "linespoints" : "points", look.point, look.colour);
    if (look.kind != Kind::kPlanned) continue;
    absl::StrAppendFormat(&plot,
                          ", \\\n  %s using 1:4 with lines dt 2 lw 1 lc rgb '#009E73'"
                          ", \\\n  %s using 1:3 with lines lw 1 lc rgb '#666666'",
                          name, name);
  }
  return absl::StrCat(script, "plot ", plot, "\n");
}

// The key that all panels share.
std::string Key() {
  std::string script =
      "unset border; unset tics; unset title; unset xlabel; unset ylabel\n"
      "set key center center horizontal samplen 2\nset xrange [0:1]\n"
      "set yrange [0:1]\nplot ";
  for (const Look& look : kLooks) {
    absl::StrAppendFormat(&script, "NaN with points pt %d lc rgb '%s' title '%s', ", look.point,
                          look.colour, OffloadMethod{look.kind}.name());
  }
  absl::StrAppend(&script,
                  "NaN with lines dt 2 lc rgb '#009E73' title 'offline plan', "
                  "NaN with lines lc rgb '#666666' title 'bound'\n");
  return script;
}

}  // namespace

std::string OffloadPlotScript(const std::vector<OffloadRow>& rows, const std::string& terminal,
                              const std::string& output) {
  const std::vector<std::string> models = NamesOf(rows, &OffloadRow::model);
  const std::vector<std::string> presets = NamesOf(rows, &OffloadRow::preset);
  const int width = std::max(kKeyWidth, kPanelWidth * static_cast<int>(presets.size()));
  const int height = kPanelHeight * static_cast<int>(models.size()) + kKeyHeight;
  std::string script = absl::StrFormat(
      "set terminal %s noenhanced size %d,%d font 'sans,10' background '#ffffff'\n"
      "set output %s\nset multiplot\nunset key\n"
      "set grid lc rgb '#dddddd' lt 1\nset border 3 lc rgb '#666666'\nset tics nomirror\n"
      "set xlabel 'device peak, MiB' offset 0,0.5\n"
      "set ylabel 'step over none (modelled)' offset 1,0\nset xrange [0:*]\nset yrange [0.9:*]\n",
      terminal == "png" ? "pngcairo" : "svg", width, height, GnuplotQuoted(output));
  for (size_t row = 0; row < models.size(); ++row) {
    for (size_t column = 0; column < presets.size(); ++column) {
      absl::StrAppendFormat(
          &script, "set size %.5f,%.5f\nset origin %.5f,%.5f\n",
          1.0 / static_cast<double>(presets.size()), static_cast<double>(kPanelHeight) / height,
          static_cast<double>(column) / static_cast<double>(presets.size()),
          1 - static_cast<double>(kPanelHeight) * static_cast<double>(row + 1) / height);
      absl::StrAppend(&script, Panel(rows, models[row], presets[column]));
    }
  }
  absl::StrAppendFormat(&script, "set size 1,%.5f\nset origin 0,0\n",
                        static_cast<double>(kKeyHeight) / height);
  return absl::StrCat(script, Key(), "unset multiplot\n");
}

absl::Status WriteOffloadPlot(const std::vector<OffloadRow>& rows, const std::string& path) {
  return DrawWithGnuplot(path, [&](const std::string& terminal, const std::string& output) {
    return OffloadPlotScript(rows, terminal, output);
  });
}

}  // namespace pinion
