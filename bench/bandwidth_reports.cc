#include "pinion/bench/bandwidth_reports.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "pinion/allocator/base/bytes.h"
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

namespace {

// Names a series without its device: "H2D", "D2H beside H2D", "H2D pageable", "H2D, node 1".
std::string SeriesLabel(const CaseResult& of_case, const Series& series) {
  const bool h2d = series.direction == CopyDirection::kHostToDevice;
  std::string label = CopyDirectionName(series.direction);
  if (of_case.bidirectional) absl::StrAppend(&label, " beside ", h2d ? "D2H" : "H2D");
  if (series.memory != "pinned") absl::StrAppend(&label, " ", series.memory);
  if (series.remote) absl::StrAppend(&label, ", node ", series.numa_node);
  return label;
}

struct Column {
  const CaseResult* of_case;
  const Series* series;
  std::string label;
};

// The sweeps of one device.
std::vector<Column> Sweeps(const BandwidthResult& result, int device) {
  std::vector<Column> columns;
  for (const CaseResult& of_case : result.cases) {
    if (of_case.latency) continue;
    for (const Series& series : of_case.series) {
      if (series.column != device || series.points.size() < 2) continue;
      columns.push_back({&of_case, &series, SeriesLabel(of_case, series)});
    }
  }
  return columns;
}

void AppendHeader(const BandwidthResult& result, std::string& text) {
  if (result.modelled) {
    text +=
        "Times are modelled by the emulated accelerator; nothing here was measured on hardware.\n";
  }
  for (const DeviceResult& device : result.devices) {
    absl::StrAppendFormat(&text, "%s  %s, %s\n", device.name, device.info.model,
                          device.info.link_name.empty() ? "unknown link" : device.info.link_name);
  }
  for (const std::string& warning : result.warnings) text += "WARNING: " + warning + "\n";
  text += "\n";
}

void AppendMatrix(const CaseResult& of_case, int columns, std::string& text) {
  if (of_case.status != CaseStatus::kPassed) {
    absl::StrAppendFormat(&text, "%s: %s: %s\n\n", of_case.name, CaseStatusName(of_case.status),
                          of_case.reason);
    return;
  }
  absl::StrAppend(&text, "Running ", of_case.name, ".\n", of_case.description, "\n   ");
  for (int column = 0; column < columns; ++column) absl::StrAppendFormat(&text, "%10d", column);
  double sum = 0;
  int row = 0;
  for (const std::vector<std::optional<double>>& values : of_case.Matrix(columns)) {
    absl::StrAppendFormat(&text, "\n%3d", row++);
    for (const std::optional<double>& value : values) {
      sum += value.value_or(0);
      text += value ? absl::StrFormat("%10.2f", *value) : "       N/A";
    }
  }
  double cv = 0;
  for (const Series& series : of_case.series) cv = std::max(cv, series.points.back().us.cv);
  absl::StrAppendFormat(&text, "\n\nSUM %s %.2f\nCOEFFICIENT_OF_VARIATION %s %.4f\n\n",
                        of_case.name, sum, of_case.name, cv);
}

void AppendSizes(const std::vector<Column>& columns, std::string& text) {
  std::map<uint64_t, nlohmann::ordered_json> rows;
  for (const Column& column : columns) {
    for (const SizePoint& point : column.series->points) {
      nlohmann::ordered_json& row = rows[point.size_bytes];
      row["size"] = HumanBytes(point.size_bytes);
      row[column.label] = point.gb_per_s();
    }
  }
  std::vector<nlohmann::ordered_json> lines;
  for (auto& [size_bytes, row] : rows) lines.push_back(std::move(row));
  absl::StrAppend(&text, RowsText(lines), "\n");
}

void AppendCurves(const std::vector<Column>& columns, std::string& text) {
  std::vector<nlohmann::ordered_json> lines;
  for (const Column& column : columns) {
    const Series& series = *column.series;
    double cv = 0;
    for (const SizePoint& point : series.points) cv = std::max(cv, point.us.cv);
    const SizePoint& best = *std::max_element(
        series.points.begin(), series.points.end(),
        [](const SizePoint& a, const SizePoint& b) { return a.gb_per_s() < b.gb_per_s(); });
    nlohmann::ordered_json line = {{"sweep", column.label}};
    if (series.curve.has_value()) {
      line["fixed us"] = series.curve->fixed_us;
      line["GB/s fitted"] = series.curve->gb_per_s;
      line["half at"] = HumanBytes(static_cast<uint64_t>(series.curve->HalfPerformanceBytes()));
    }
    line["best GB/s"] = best.gb_per_s();
    line["p5 there"] = best.p5_gb_per_s();
    line["p95 there"] = best.p95_gb_per_s();
    line["worst CV %"] = 100 * cv;
    lines.push_back(std::move(line));
  }
  absl::StrAppend(&text, RowsText(lines), "\n");
}

void AppendShare(const BandwidthResult& result, int device, std::string& text) {
  const double rated = result.devices[device].info.rated_gb_per_s;
  if (rated == 0) return;
  for (const CopyDirection direction :
       {CopyDirection::kHostToDevice, CopyDirection::kDeviceToHost}) {
    double best = 0;
    for (const Column& column : Sweeps(result, device)) {
      if (column.series->direction != direction || column.of_case->bidirectional) continue;
      best = std::max(best, column.series->best_gb_per_s());
    }
    if (best == 0) continue;
    absl::StrAppendFormat(&text,
                          "%s reaches %.1f GB/s, %.0f %% of the %.4g GB/s that %s is rated at\n",
                          CopyDirectionName(direction), best, 100 * best / rated, rated,
                          result.devices[device].info.link_name);
  }
}

nlohmann::ordered_json CaseJson(const CaseResult& of_case, int columns) {
  nlohmann::ordered_json json;
  json["name"] = of_case.name;
  json["status"] = CaseStatusName(of_case.status);
  if (of_case.status != CaseStatus::kPassed) {
    if (of_case.status == CaseStatus::kError) json["error"] = of_case.reason;
    return json;
  }
  json["bandwidth_description"] = of_case.description;
  std::vector<double> values;
  for (const std::vector<std::optional<double>>& row : of_case.Matrix(columns)) {
    nlohmann::ordered_json texts = nlohmann::ordered_json::array();
    for (const std::optional<double>& value : row) {
      texts.push_back(value ? absl::StrFormat("%g", *value) : "N/A");
      if (value) values.push_back(*value);
    }
    json["bandwidth_matrix"].push_back(std::move(texts));
  }
  double sum = 0;
  for (const double value : values) sum += value;
  json["sum"] = sum;
  if (values.empty()) return json;
  json["min"] = *std::min_element(values.begin(), values.end());
  json["max"] = *std::max_element(values.begin(), values.end());
  json["average"] = sum / static_cast<double>(values.size());
  return json;
}

}  // namespace

std::string BandwidthText(const BandwidthResult& result) {
  std::string text;
  AppendHeader(result, text);
  const int devices = static_cast<int>(result.devices.size());
  for (const CaseResult& of_case : result.cases) AppendMatrix(of_case, devices, text);
  for (int device = 0; device < devices; ++device) {
    const std::vector<Column> columns = Sweeps(result, device);
    if (!columns.empty()) {
      absl::StrAppendFormat(&text, "%s: GB/s, the median of its samples%s\n",
                            result.devices[device].name, result.modelled ? " (modelled)" : "");
      AppendSizes(columns, text);
      AppendCurves(columns, text);
    }
    AppendShare(result, device, text);
    if (const auto& calibration = result.devices[device].calibration) {
      absl::StrAppend(&text, "The engine's calibration:\n", calibration->ToString(), "\n");
    }
    text += "\n";
  }
  return text;
}

nlohmann::ordered_json NvbandwidthJson(const BandwidthResult& result) {
  nlohmann::ordered_json json;
  json["version"] = "Pinion";
  json["git_version"] = "";
  json["CUDA Runtime Version"] = result.cuda_runtime_version;
  json["Driver Version"] = result.driver_version;
  json["GPU Device list"] = nlohmann::ordered_json::array();
  for (size_t i = 0; i < result.devices.size(); ++i) {
    json["GPU Device list"].push_back(absl::StrCat(i, ": ", result.devices[i].info.model));
  }
  std::vector<std::string> warnings = result.warnings;
  if (result.modelled) warnings.push_back("all values are modelled, none was measured");
  if (!warnings.empty()) json["warning"] = absl::StrJoin(warnings, "; ");
  json["testcases"] = nlohmann::ordered_json::array();
  for (const CaseResult& of_case : result.cases) {
    json["testcases"].push_back(CaseJson(of_case, static_cast<int>(result.devices.size())));
  }
  return {{"nvbandwidth", std::move(json)}};
}

}  // namespace pinion
