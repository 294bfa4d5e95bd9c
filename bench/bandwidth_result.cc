#include "pinion/bench/bandwidth_result.h"

#include <algorithm>
#include <cmath>
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
          {"case", result.name},
          {"device", series.device},
          {"direction", CopyDirectionName(series.direction)},
          {"memory", series.memory},
          {"numa_node", series.numa_node},
          {"remote_numa_node", series.remote},
          {"modelled", modelled}};
}

void AddPointRow(const CaseResult& result, const Series& series, const SizePoint& point,
                 bool modelled, BenchReport& report) {
  nlohmann::ordered_json row = SeriesJson("point", result, series, modelled);
  if (point.size_bytes > 0) row["size_bytes"] = point.size_bytes;
  row["samples"] = point.us.samples;
  row["copies_per_sample"] = point.copies;
  row["us_per_copy"] = point.us.median;
  row["us_per_copy_p5"] = point.us.p5;
  row["us_per_copy_p95"] = point.us.p95;
  row["coefficient_of_variation"] = point.us.cv;
  if (!result.latency) row["gb_per_s"] = point.gb_per_s();
  report.AddRow(std::move(row));
}

void AddCaseRows(const CaseResult& result, bool modelled, BenchReport& report) {
  if (result.status != CaseStatus::kPassed) {
    report.AddRow({{"row", "no result"},
                   {"case", result.name},
                   {"status", CaseStatusName(result.status)},
                   {"reason", result.reason}});
  }
  for (const Series& series : result.series) {
    for (const SizePoint& point : series.points) {
      AddPointRow(result, series, point, modelled, report);
    }
    if (!series.curve.has_value()) continue;
    nlohmann::ordered_json row = SeriesJson("fit", result, series, modelled);
    row["gb_per_s"] = series.curve->gb_per_s;
    row["fixed_us"] = series.curve->fixed_us;
    row["half_performance_bytes"] = series.curve->HalfPerformanceBytes();
    report.AddRow(std::move(row));
  }
}

void AddDeviceRows(const DeviceResult& device, BenchReport& report) {
  report.AddRow({{"row", "device"},
                 {"device", device.name},
                 {"model", device.info.model},
                 {"link", device.info.link_name},
                 {"rated_gb_per_s", device.info.rated_gb_per_s},
                 {"modelled", device.info.modelled}});
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
}

// Judges one sweep, and the calibration of the same link.
void AddSweepGoals(const BandwidthResult& result, int column, CopyDirection direction,
                   bool bidirectional, BenchReport& report) {
  const std::string prefix =
      direction == CopyDirection::kHostToDevice ? "host_to_device_" : "device_to_host_";
  const std::string name = prefix + (bidirectional ? "bidirectional_memcpy_ce" : "memcpy_ce");
  const CaseResult* const of_case = result.Find(name);
  if (of_case == nullptr) return;  // not selected
  const Series* const series = NearPinned(*of_case, column, direction);
  const DeviceResult& device = result.devices[column];
  std::optional<double> fit_off;
  std::optional<double> calibration_off;
  if (series != nullptr && series->curve.has_value()) {
    const SizePoint& largest = series->points.back();
    fit_off = Off(largest.gb_per_s(), series->curve->CopyGbPerS(largest.size_bytes));
    if (device.calibration.has_value()) {
      calibration_off = Off(bidirectional ? DuplexGbPerSOf(*device.calibration, direction)
                                          : CurveOf(*device.calibration, direction).gb_per_s,
                            series->curve->gb_per_s);
    }
  }
  const std::string of = absl::StrCat(" (", name, ", ", device.name, ")");
  report.AddGoal("fitted curve off the largest copy" + of, AtMost(kFitTolerance), fit_off);
  report.AddGoal("engine's calibration off the sweep" + of, AtMost(kCalibrationTolerance),
                 calibration_off);
}

}  // namespace

double Series::best_gb_per_s() const {
  double best = 0;
  for (const SizePoint& point : points) best = std::max(best, point.gb_per_s());
  return best;
}

const char* CaseStatusName(CaseStatus status) {
  switch (status) {
    case CaseStatus::kPassed:
      return "Passed";
    case CaseStatus::kWaived:
      return "Waived";
    case CaseStatus::kError:
      break;
  }
  return "Error";
}

std::vector<std::vector<std::optional<double>>> CaseResult::Matrix(int columns) const {
  std::vector<std::vector<std::optional<double>>> rows;
  for (const CopyDirection direction : kDirections) {
    std::vector<std::optional<double>> row(columns);
    bool any = false;
    for (int column = 0; column < columns; ++column) {
      const Series* const near = NearPinned(*this, column, direction);
      if (near == nullptr) continue;
      row[column] = Value(near->points.back());
      any = true;
    }
    if (any) rows.push_back(std::move(row));
  }
  if (rows.empty()) rows.emplace_back(columns);
  return rows;
}

const CaseResult* BandwidthResult::Find(const std::string& name) const {
  const auto it = std::find_if(cases.begin(), cases.end(),
                               [&](const CaseResult& result) { return result.name == name; });
  return it == cases.end() ? nullptr : &*it;
}

const Series* NearPinned(const CaseResult& result, int column, CopyDirection direction) {
  for (const Series& series : result.series) {
    if (series.column == column && series.direction == direction) return &series;
  }
  return nullptr;
}

BenchReport MakeReport(const BandwidthResult& result) {
  BenchReport report;
  for (const DeviceResult& device : result.devices) AddDeviceRows(device, report);
  double errors = 0;
  for (const CaseResult& of_case : result.cases) {
    AddCaseRows(of_case, result.modelled, report);
    if (of_case.status == CaseStatus::kError) ++errors;
  }
  report.AddGoal("cases that failed, wrong bytes included", AtMost(0), errors);
  for (int column = 0; column < static_cast<int>(result.devices.size()); ++column) {
    for (const bool bidirectional : {false, true}) {
      for (const CopyDirection direction : kDirections) {
        AddSweepGoals(result, column, direction, bidirectional, report);
      }
    }
  }
  return report;
}

}  // namespace pinion
