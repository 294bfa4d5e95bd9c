#include "pinion/bench/goals.h"

#include <algorithm>
#include <cmath>
#include <iostream>
#include <iterator>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/programs/output_file.h"

namespace pinion {
namespace {

std::string CellText(const nlohmann::ordered_json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_number_float()) return value.dump();
  const double number = value.get<double>();
  return std::abs(number) < 1000 ? absl::StrFormat("%.4g", number)
                                 : absl::StrFormat("%.0f", number);
}

}  // namespace

std::string Bound::ToString() const {
  return absl::StrFormat("%s %.4g", kind == Kind::kAtLeast ? ">=" : "<=", limit);
}

std::string RowsText(absl::Span<const nlohmann::ordered_json> rows) {
  std::vector<std::string> fields;
  for (const nlohmann::ordered_json& row : rows) {
    for (const auto& field : row.items()) {
      if (std::count(fields.begin(), fields.end(), field.key()) == 0) fields.push_back(field.key());
    }
  }
  std::vector<std::string> heading;
  std::vector<std::string> lines(rows.size() + 1);
  for (const std::string& field : fields) {
    std::vector<std::string> cells = {field};
    for (const nlohmann::ordered_json& row : rows) {
      cells.push_back(row.contains(field) ? CellText(row[field]) : "-");
    }
    if (std::count(cells.begin() + 1, cells.end(), cells[1]) == std::ssize(rows) &&
        rows.size() > 1) {
      heading.push_back(absl::StrCat(field, " ", cells[1]));
      continue;
    }
    size_t width = 0;
    for (const std::string& cell : cells) width = std::max(width, cell.size());
    for (size_t i = 0; i < lines.size(); ++i)
      absl::StrAppendFormat(&lines[i], "  %*s", width, cells[i]);
  }
  return absl::StrCat(absl::StrJoin(heading, ", "), "\n", absl::StrJoin(lines, "\n"), "\n");
}

void BenchReport::PrintRows() {
  if (printed_rows_ == rows_.size()) return;
  std::cout << RowsText(absl::MakeConstSpan(rows_).subspan(printed_rows_)) << std::endl;
  printed_rows_ = rows_.size();
}

nlohmann::ordered_json BenchReport::ToJson() const {
  nlohmann::ordered_json goals = nlohmann::ordered_json::array();
  for (const Goal& goal : goals_) {
    nlohmann::ordered_json json;
    json["name"] = goal.name;
    json["goal"] = goal.bound.ToString();
    json["value"] = goal.value ? nlohmann::ordered_json(*goal.value) : nullptr;
    json["met"] = goal.value ? nlohmann::ordered_json(goal.met()) : nullptr;
    goals.push_back(std::move(json));
  }
  return {{"rows", rows_}, {"goals", std::move(goals)}};
}

std::string BenchReport::GoalsText() const {
  std::string text;
  for (const Goal& goal : goals_) {
    absl::StrAppendFormat(&text, "%-6s  %s: %s (goal %s)\n",
                          goal.met()      ? "met"
                          : goal.missed() ? "MISSED"
                                          : "-",
                          goal.name,
                          goal.value ? absl::StrFormat("%.4g", *goal.value) : "not measured",
                          goal.bound.ToString());
  }
  return text;
}

absl::Status BenchReport::Finish(const std::string& path) const {
  std::cout << GoalsText() << std::flush;
  if (!path.empty()) PINION_RETURN_IF_ERROR(WriteAtomically(path, ToJson().dump(1) + "\n"));
  std::string missed;
  for (const Goal& goal : goals_) {
    if (goal.missed()) absl::StrAppend(&missed, "\n  ", goal.name);
  }
  if (missed.empty()) return absl::OkStatus();
  return absl::OutOfRangeError("goals that are missed:" + missed);
}

int ExitCode(const char* program, const absl::Status& status) {
  if (status.ok()) return 0;
  std::cerr << program << ": " << status.message() << "\n";
  return absl::IsOutOfRange(status) ? 1 : 2;
}

double Quantile(const std::vector<double>& sorted, double share) {
  PINION_CHECK(!sorted.empty()) << "no values";
  const double position = share * static_cast<double>(sorted.size() - 1);
  const size_t below = static_cast<size_t>(position);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  return std::lerp(sorted[below], sorted[above], position - static_cast<double>(below));
}

Summary Summarize(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  Summary summary;
  summary.samples = static_cast<int>(values.size());
  summary.median = Quantile(values, 0.5);
  summary.p5 = Quantile(values, 0.05);
  summary.p95 = Quantile(values, 0.95);
  if (values.size() > 1) {
    const double count = static_cast<double>(values.size());
    const double mean = std::accumulate(values.begin(), values.end(), 0.0) / count;
    double squares = 0;
    for (const double value : values) squares += (value - mean) * (value - mean);
    summary.cv = std::sqrt(squares / (count - 1)) / mean;
  }
  return summary;
}

}  // namespace pinion
