#include "pinion/bench/attribution/attribution_table.h"

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "pinion/allocator/base/bytes.h"

namespace pinion {
namespace {

using Kind = AttributionWay::Kind;
using Method = AttributionWay::Method;

// At most this bound over the step: the link can hide the copies.
constexpr double kHidden = 1.01;
constexpr double kOfPlainDefault = 1.02;
// Pinion overlaps copies with compute on every preset, so it is faster than ways that block.
constexpr double kFaster = 0.99;
constexpr double kMostMinutes = 10;

double Mib(uint64_t bytes) { return static_cast<double>(bytes) / kMiB; }

bool IsPinion(const AttributionRow& row) { return row.way.kind == Kind::kPinion; }
bool HasProducts(const AttributionRow& row) {
  return row.way.method == Method::kGradientXActivation && row.way.kind != Kind::kPlain;
}

// The row of the same model, preset and method.
const AttributionRow* Find(const std::vector<AttributionRow>& rows, const AttributionRow& like,
                           Kind kind, bool in_scope) {
  for (const AttributionRow& row : rows) {
    if (row.model == like.model && row.preset == like.preset && row.way.method == like.way.method &&
        row.way.kind == kind && row.way.in_scope == in_scope) {
      return &row;
    }
  }
  return nullptr;
}

double TimeOver(const AttributionRow& row, const AttributionRow& other) {
  return row.cost.time_us / other.cost.time_us;
}

using Value = std::function<std::optional<double>(const AttributionRow&)>;

std::optional<double> Most(const AttributionTable& table, const Value& value) {
  std::optional<double> most;
  for (const AttributionRow& row : table.rows) {
    const std::optional<double> of_row = value(row);
    if (of_row.has_value()) most = std::max(most.value_or(*of_row), *of_row);
  }
  return most;
}

// Pinion's peak above the step's, over the two largest tensors.
Value PeakOfAllowed(const AttributionTable& table, Method method, bool in_scope) {
  return [&table, method, in_scope](const AttributionRow& row) -> std::optional<double> {
    if (!IsPinion(row) || row.way.method != method || row.way.in_scope != in_scope) {
      return std::nullopt;
    }
    const AttributionRow* const plain = Find(table.rows, row, Kind::kPlain, in_scope);
    if (plain == nullptr) return std::nullopt;
    return (Mib(row.cost.peak_bytes) - Mib(plain->cost.peak_bytes)) / Mib(row.two_largest_bytes);
  };
}

// Pinion's time over the time of one of Captum's ways.
Value TimeOverCaptum(const AttributionTable& table, Method method, Kind kind) {
  return [&table, method, kind](const AttributionRow& row) -> std::optional<double> {
    if (!IsPinion(row) || row.way.in_scope || row.way.method != method) return std::nullopt;
    const AttributionRow* const captum = Find(table.rows, row, kind, false);
    return captum != nullptr ? std::optional(TimeOver(row, *captum)) : std::nullopt;
  };
}

bool IsHidden(const AttributionTable& table, const AttributionRow& row) {
  const AttributionRow* const captum = Find(table.rows, row, Kind::kCaptum, false);
  return captum != nullptr && row.bound_us <= kHidden * captum->cost.time_us;
}

nlohmann::ordered_json JsonOf(const AttributionRow& row) {
  nlohmann::ordered_json json = {{"model", row.model},
                                 {"preset", row.preset},
                                 {"method", row.way.method_name()},
                                 {"way", row.way.name()},
                                 {"peak_mib", Mib(row.cost.peak_bytes)},
                                 {"held_mib", Mib(row.cost.held_bytes)},
                                 {"time_us", row.cost.time_us},
                                 {"host_arithmetic_us", row.cost.arithmetic_us},
                                 {"copied_mib", Mib(row.cost.copied_bytes)},
                                 {"captured_mib", Mib(row.captured_bytes)},
                                 {"two_largest_mib", Mib(row.two_largest_bytes)},
                                 {"bound_us", row.bound_us},
                                 {"bound_of_two_us", row.bound_of_two_us}};
  if (row.way.kind != Kind::kPlain) json["same_values"] = row.same_values;
  return json;
}

}  // namespace

std::string AttributionWay::method_name() const {
  return method == Method::kActivation ? "activation" : "gradient x activation";
}

std::string AttributionWay::name() const {
  const char* const names[] = {"plain", "captum", "captum, then .cpu()", "captum, memory_efficient",
                               "pinion"};
  return absl::StrCat(names[static_cast<int>(kind)], in_scope ? ", in a scope" : "");
}

std::string AttributionText(const std::vector<AttributionRow>& rows) {
  std::string text =
      absl::StrFormat("%s on %s (modelled)\n", rows.front().model, rows.front().preset);
  const AttributionRow* before = nullptr;
  for (const AttributionRow& row : rows) {
    if (before == nullptr || before->way.method != row.way.method) {
      absl::StrAppendFormat(&text, "  %-26s %9s %9s %9s %9s %9s %9s %9s  %s\n",
                            absl::StrCat(row.way.method_name(), ":"), "peak MiB", "over plain",
                            "time us", "of captum", "host us", "copied", "held MiB", "values");
    }
    before = &row;
    const AttributionRow* const plain = Find(rows, row, Kind::kPlain, row.way.in_scope);
    const AttributionRow* const captum = Find(rows, row, Kind::kCaptum, false);
    absl::StrAppendFormat(
        &text, "  %-26s %9.2f %+10.2f %9.0f %9.3f %9.0f %9.2f %9.2f  %s\n", row.way.name(),
        Mib(row.cost.peak_bytes),
        plain != nullptr ? Mib(row.cost.peak_bytes) - Mib(plain->cost.peak_bytes) : 0.0,
        row.cost.time_us, captum != nullptr ? TimeOver(row, *captum) : 0.0, row.cost.arithmetic_us,
        Mib(row.cost.copied_bytes), Mib(row.cost.held_bytes),
        row.way.kind == Kind::kPlain ? "-"
        : row.same_values            ? "same"
                                     : "OTHERS");
    if (!IsPinion(row) || row.way.in_scope || captum == nullptr) continue;
    const auto add_bound = [&](const char* name, double bound_us) {
      absl::StrAppendFormat(&text, "  %-26s %9s %10s %9.0f %9.3f\n", name, "", "", bound_us,
                            bound_us / captum->cost.time_us);
    };
    absl::StrAppendFormat(&text, "  %-26s %9s %+10.2f\n", "  may take", "",
                          Mib(row.two_largest_bytes));
    add_bound("  bound", row.bound_us);
    add_bound("  bound, two largest", row.bound_of_two_us);
  }
  return text;
}

BenchReport AttributionReport(const AttributionTable& table) {
  BenchReport report;
  for (const AttributionRow& row : table.rows) report.AddRow(JsonOf(row));
  AddPathRows(table.paths, report);
  const std::string above = "peak above the step's over the two largest captures";
  for (const bool in_scope : {false, true}) {
    report.AddGoal(
        absl::StrCat("gradient x activation", in_scope ? ", in an OffloadScope: " : ": ", above),
        AtMost(1), Most(table, PeakOfAllowed(table, Method::kGradientXActivation, in_scope)));
  }
  report.AddGoal(absl::StrCat("activation: ", above), AtMost(1),
                 Most(table, PeakOfAllowed(table, Method::kActivation, false)));
  for (const Kind kind : {Kind::kCaptumThenCpu, Kind::kCaptumMemoryEfficient}) {
    report.AddGoal(
        absl::StrCat("gradient x activation: time over ", AttributionWay{.kind = kind}.name()),
        AtMost(kFaster), Most(table, TimeOverCaptum(table, Method::kGradientXActivation, kind)));
  }
  report.AddGoal("activation: time over captum, then .cpu()", AtMost(kFaster),
                 Most(table, TimeOverCaptum(table, Method::kActivation, Kind::kCaptumThenCpu)));
  for (const Method method : {Method::kGradientXActivation, Method::kActivation}) {
    const Value over = TimeOverCaptum(table, method, Kind::kCaptum);
    const auto hidden = [&](const AttributionRow& row) {
      return IsHidden(table, row) ? over(row) : std::nullopt;
    };
    const auto count =
        std::count_if(table.rows.begin(), table.rows.end(),
                      [&](const AttributionRow& row) { return hidden(row).has_value(); });
    report.AddGoal(absl::StrCat(AttributionWay{.method = method}.method_name(), ", of ", count,
                                " calls whose copies the link can hide: time over captum"),
                   AtMost(kOfPlainDefault), Most(table, hidden));
  }
  report.AddGoal("MiB of the device that are held with Pinion's results", AtMost(0),
                 Most(table, [](const AttributionRow& row) {
                   return IsPinion(row) ? std::optional(Mib(row.cost.held_bytes)) : std::nullopt;
                 }));
  const auto pinions = [&table](const std::function<bool(const AttributionRow&)>& counts) {
    std::optional<double> rows;
    for (const AttributionRow& row : table.rows) {
      if (IsPinion(row)) rows = rows.value_or(0) + (counts(row) ? 1 : 0);
    }
    return rows;
  };
  report.AddGoal("calls with other values than Captum's", AtMost(0),
                 pinions([](const AttributionRow& row) { return !row.same_values; }));
  report.AddGoal("calls whose products took no time on the host", AtMost(0),
                 pinions([](const AttributionRow& row) {
                   return HasProducts(row) && row.cost.arithmetic_us == 0;
                 }));
  AddPathGoals(table.paths, report);
  report.AddGoal("minutes for the table", AtMost(kMostMinutes), table.minutes);
  return report;
}

}  // namespace pinion
