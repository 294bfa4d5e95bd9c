#include "pinion/bench/bandwidth_reports.h"

#include <algorithm>
#include <cmath>
#include <iostream>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "pinion/engine/link/calibrate_link.h"

namespace pinion {
namespace {

constexpr CopyDirection kDirections[] = {CopyDirection::kHostToDevice,
                                         CopyDirection::kDeviceToHost};

// Two measurements of the same quantity may differ this much on an idle link.
constexpr double kFitTolerance = 0.03;
constexpr double kCalibrationTolerance = 0.05;

double Off(double value, double reference) { return std::abs(value / reference - 1); }

nlohmann::ordered_json SeriesJson(const char* row, const CaseResult& result, const Series& series,
                                  bool modelled) {
  return {{"row", row},
          {"case", result.of.name},
          {"device", series.device},
          {"direction", CopyDirectionName(result.of.direction)},
          {"memory", series.memory},
          {"numa_node", series.numa_node},
          {"remote_numa_node", series.remote},
          {"modelled", modelled}};
}

void AddPointRow(const CaseResult& result, const Series& series, const SizePoint& point,
                 bool modelled, BenchReport& report) {
  nlohmann::ordered_json row = SeriesJson("point", result, series, modelled);
  row["size_bytes"] = point.size_bytes;
  row["samples"] = point.us.samples;
  row["copies_per_sample"] = point.copies;
  row["us_per_copy"] = point.us.median;
  row["us_per_copy_p5"] = point.us.p5;
  row["us_per_copy_p95"] = point.us.p95;
  row["coefficient_of_variation"] = point.us.cv;
  row["gb_per_s"] = point.gb_per_s();
  report.AddRow(std::move(row));
}

void AddCaseRows(const CaseResult& result, bool modelled, BenchReport& report) {
  if (!result.status.ok()) {
    report.AddRow({{"row", "error"}, {"case", result.of.name}, {"error", result.status.message()}});
  }
  for (const Series& series : result.series) {
    for (const SizePoint& point : series.points) {
      AddPointRow(result, series, point, modelled, report);
    }
  }
}

// Adds the fits of one device, and its calibration.
void AddCurveRows(const BandwidthResult& result, const DeviceResult& device, BenchReport& report) {
  for (const CaseResult& of_case : result.cases) {
    for (const Series& series : of_case.series) {
      if (series.device != device.name || !series.curve.has_value()) continue;
      nlohmann::ordered_json row = SeriesJson("fit", of_case, series, result.modelled);
      row["gb_per_s"] = series.curve->gb_per_s;
      row["fixed_us"] = series.curve->fixed_us;
      row["half_performance_bytes"] = series.curve->HalfPerformanceBytes();
      if (const double rated = device.info.rated_gb_per_s; rated > 0) {
        row["of_rated"] = series.curve->gb_per_s / rated;
      }
      report.AddRow(std::move(row));
    }
  }
  report.PrintRows();
  if (!device.calibration.has_value()) return;
  for (const CopyDirection direction : kDirections) {
    const LinkCurve& curve = CurveOf(*device.calibration, direction);
    report.AddRow({{"row", "calibration"},
                   {"device", device.name},
                   {"direction", CopyDirectionName(direction)},
                   {"gb_per_s", curve.gb_per_s},
                   {"duplex_gb_per_s", DuplexGbPerSOf(*device.calibration, direction)},
                   {"fixed_us", curve.fixed_us},
                   {"piece_us", curve.piece_us},
                   {"modelled", device.info.modelled}});
  }
  report.PrintRows();
}

// Judges one sweep, and the calibration of the same link.
void AddSweepGoals(const CaseResult& result, const DeviceResult& device, BenchReport& report) {
  const Series* const series = result.NearPinned(device.name);
  const CopyDirection direction = result.of.direction;
  std::optional<double> fit_off;
  std::optional<double> calibration_off;
  if (series != nullptr && series->curve.has_value()) {
    const SizePoint& largest = series->points.back();
    fit_off = Off(largest.gb_per_s(), series->curve->CopyGbPerS(largest.size_bytes));
    if (device.calibration.has_value()) {
      calibration_off =
          Off(result.of.bidirectional ? DuplexGbPerSOf(*device.calibration, direction)
                                      : CurveOf(*device.calibration, direction).gb_per_s,
              series->curve->gb_per_s);
    }
  }
  const std::string of = absl::StrCat(" (", result.of.name, ", ", device.name, ")");
  report.AddGoal("fitted curve off the largest copy" + of, AtMost(kFitTolerance), fit_off);
  report.AddGoal("engine's calibration off the sweep" + of, AtMost(kCalibrationTolerance),
                 calibration_off);
}

}  // namespace

const Series* CaseResult::NearPinned(const std::string& device) const {
  const auto it = std::find_if(series.begin(), series.end(),
                               [&](const Series& one) { return one.device == device; });
  return it == series.end() ? nullptr : &*it;
}

const CaseResult* BandwidthResult::Find(const std::string& name) const {
  const auto it = std::find_if(cases.begin(), cases.end(),
                               [&](const CaseResult& result) { return result.of.name == name; });
  return it == cases.end() ? nullptr : &*it;
}

void AddBandwidth(const BandwidthResult& result, BenchReport& report) {
  for (const std::string& warning : result.warnings) std::cout << "WARNING: " << warning << "\n";
  for (const DeviceResult& device : result.devices) {
    report.AddRow({{"row", "device"},
                   {"device", device.name},
                   {"model", device.info.model},
                   {"link", device.info.link_name},
                   {"rated_gb_per_s", device.info.rated_gb_per_s},
                   {"modelled", device.info.modelled}});
  }
  report.PrintRows();
  double errors = 0;
  for (const CaseResult& of_case : result.cases) {
    AddCaseRows(of_case, result.modelled, report);
    if (!of_case.status.ok()) ++errors;
    if (!of_case.of.all_devices) report.PrintRows();  // those cases have one size
  }
  report.PrintRows();
  report.AddGoal("cases that failed, wrong bytes included", AtMost(0), errors);
  for (const DeviceResult& device : result.devices) {
    AddCurveRows(result, device, report);
    for (const CaseResult& of_case : result.cases) {
      if (!of_case.of.all_devices) AddSweepGoals(of_case, device, report);
    }
  }
}

}  // namespace pinion
