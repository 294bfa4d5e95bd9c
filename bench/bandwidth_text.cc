#include "pinion/bench/bandwidth_text.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/device.h"

namespace pinion {
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

  // Returns the column's width in a table, with room for any number.
  int width() const { return static_cast<int>(std::max<size_t>(label.size(), 6)) + 3; }
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
  std::map<uint64_t, std::vector<std::optional<double>>> rows;
  for (size_t i = 0; i < columns.size(); ++i) {
    for (const SizePoint& point : columns[i].series->points) {
      std::vector<std::optional<double>>& row = rows[point.size_bytes];
      row.resize(columns.size());
      row[i] = point.gb_per_s();
    }
  }
  absl::StrAppendFormat(&text, "%10s", "size");
  for (const Column& column : columns) {
    absl::StrAppendFormat(&text, "%*s", column.width(), column.label);
  }
  for (const auto& [size_bytes, row] : rows) {
    absl::StrAppendFormat(&text, "\n%10s", HumanBytes(size_bytes));
    for (size_t i = 0; i < row.size(); ++i) {
      const int width = columns[i].width();
      text += row[i] ? absl::StrFormat("%*.2f", width, *row[i]) : std::string(width, ' ');
    }
  }
  text += "\n\n";
}

void AppendCurves(const std::vector<Column>& columns, std::string& text) {
  size_t width = 0;
  for (const Column& column : columns) width = std::max(width, column.label.size());
  absl::StrAppendFormat(
      &text, "%*s  fixed us  GB/s fitted  half at   best GB/s   p5..p95 there  worst CV\n",
      static_cast<int>(width), "");
  for (const Column& column : columns) {
    const Series& series = *column.series;
    double cv = 0;
    for (const SizePoint& point : series.points) cv = std::max(cv, point.us.cv);
    const SizePoint& best = *std::max_element(
        series.points.begin(), series.points.end(),
        [](const SizePoint& a, const SizePoint& b) { return a.gb_per_s() < b.gb_per_s(); });
    const std::string curve =
        series.curve ? absl::StrFormat(
                           "%8.2f%13.2f%10s", series.curve->fixed_us, series.curve->gb_per_s,
                           HumanBytes(static_cast<uint64_t>(series.curve->HalfPerformanceBytes())))
                     : std::string(31, ' ');
    absl::StrAppendFormat(&text, "%*s  %s%11.2f%8.2f..%-8.2f%7.2f %%\n", static_cast<int>(width),
                          column.label, curve, best.gb_per_s(), best.p5_gb_per_s(),
                          best.p95_gb_per_s(), 100 * cv);
  }
  text += "\n";
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
