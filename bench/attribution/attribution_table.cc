#include "pinion/bench/attribution/attribution_table.h"

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>

#include "absl/strings/str_cat.h"

namespace pinion {
namespace {

using Kind = AttributionWay::Kind;
using Method = AttributionWay::Method;

// At most this bound over the step: the link can hide the copies.
constexpr double kHidden = 1.01;
constexpr double kOfPlainDefault = 1.02;
// Pinion overlaps copies with compute on every preset, so it is faster than ways that block.
constexpr double kFaster = 0.99;

bool IsPinion(const AttributionRow& row) { return row.way.kind == Kind::kPinion; }

// The row of the same model, preset and method.
const AttributionRow* Find(const std::vector<AttributionRow>& rows, const AttributionRow& like,
                           Kind kind) {
  for (const AttributionRow& row : rows) {
    if (row.model == like.model && row.preset == like.preset && row.way.method == like.way.method &&
        row.way.kind == kind) {
      return &row;
    }
  }
  return nullptr;
}

double TimeOver(const AttributionRow& row, const AttributionRow& other) {
  return row.cost.time_us / other.cost.time_us;
}

using Value = std::function<std::optional<double>(const AttributionRow&)>;

// Pinion's peak above the step's, over the two largest tensors.
Value PeakOfAllowed(const AttributionTable& table, Method method) {
  return [&table, method](const AttributionRow& row) -> std::optional<double> {
    if (!IsPinion(row) || row.way.method != method) return std::nullopt;
    const AttributionRow* const plain = Find(table.rows, row, Kind::kPlain);
    if (plain == nullptr) return std::nullopt;
    return (Mib(row.cost.peak_bytes) - Mib(plain->cost.peak_bytes)) / Mib(row.two_largest_bytes);
  };
}

// Pinion's time over the time of one of Captum's ways.
Value TimeOverCaptum(const AttributionTable& table, Method method, Kind kind) {
  return [&table, method, kind](const AttributionRow& row) -> std::optional<double> {
    if (!IsPinion(row) || row.way.method != method) return std::nullopt;
    const AttributionRow* const captum = Find(table.rows, row, kind);
    return captum != nullptr ? std::optional(TimeOver(row, *captum)) : std::nullopt;
  };
}

bool IsHidden(const AttributionTable& table, const AttributionRow& row) {
  const AttributionRow* const captum = Find(table.rows, row, Kind::kCaptum);
  return captum != nullptr && row.bound_us <= kHidden * captum->cost.time_us;
}

// Pinion's copies to the host overlap the device's work.
constexpr double kOverBestGuess = 1.02;
// Few steps do not amortize Pinion's probing passes of one and eight rows, nor the last pass's
// copies to the host.
constexpr double kOverOneBatch = 1.1;
// Passes of other sizes sum float32 in another order.
constexpr double kRounding = 1e-5;

// Captum's row of the same model, preset, method, steps and memory.
const PathRow* CaptumPathOf(const std::vector<PathRow>& rows, const PathRow& like) {
  for (const PathRow& row : rows) {
    if (!row.way.is_pinion && row.model == like.model && row.preset == like.preset &&
        row.way.method == like.way.method && row.way.n_steps == like.way.n_steps &&
        row.way.budget_steps == like.way.budget_steps) {
      return &row;
    }
  }
  return nullptr;
}

std::optional<double> PathTimeOverCaptum(const std::vector<PathRow>& rows, const PathRow& row) {
  const PathRow* const captum = CaptumPathOf(rows, row);
  return captum != nullptr ? std::optional(row.time_us / captum->time_us) : std::nullopt;
}

void AddPathGoals(const std::vector<PathRow>& rows, BenchReport& report) {
  const auto of_pinion = [](const auto& value) {
    return [value](const PathRow& row) -> std::optional<double> {
      return row.way.is_pinion ? std::optional<double>(value(row)) : std::nullopt;
    };
  };
  report.AddGoal(
      "within a budget, at any number of steps: peak over the budget", AtMost(1), rows,
      of_pinion([](const PathRow& row) { return Mib(row.peak_bytes) / Mib(row.budget_bytes); }));
  const auto over_captum = [&rows](bool fits_at_once) {
    return [&rows, fits_at_once](const PathRow& row) -> std::optional<double> {
      if (!row.way.is_pinion || row.way.fits_at_once() != fits_at_once) return std::nullopt;
      return PathTimeOverCaptum(rows, row);
    };
  };
  report.AddGoal("within a budget: time over captum with the largest internal_batch_size that fits",
                 AtMost(kOverBestGuess), rows, over_captum(false));
  report.AddGoal("within a budget: time over captum's one batch where that just fits",
                 AtMost(kOverOneBatch), rows, over_captum(true));
  report.AddGoal("within a budget: values' difference from captum's over the largest of them",
                 AtMost(kRounding), rows,
                 of_pinion([](const PathRow& row) { return row.difference; }));
}

}  // namespace

std::string AttributionWay::method_name() const {
  return method == Method::kActivation ? "activation" : "gradient x activation";
}

std::string AttributionWay::name() const {
  const char* const names[] = {"plain", "captum", "captum, then .cpu()", "captum, memory_efficient",
                               "pinion"};
  return names[static_cast<int>(kind)];
}

std::string PathMethodName(PathMethod method) {
  const char* const names[] = {"IntegratedGradients", "LayerIntegratedGradients",
                               "LayerConductance"};
  return names[static_cast<int>(method)];
}

void AddRows(const std::vector<AttributionRow>& rows, BenchReport& report) {
  for (const AttributionRow& row : rows) {
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
                                   {"bound_us", row.bound_us}};
    if (const auto* plain = Find(rows, row, Kind::kPlain); plain != nullptr) {
      json["over_plain_mib"] = Mib(row.cost.peak_bytes) - Mib(plain->cost.peak_bytes);
    }
    if (const auto* captum = Find(rows, row, Kind::kCaptum); captum != nullptr) {
      json["of_captum"] = TimeOver(row, *captum);
    }
    if (row.way.kind != Kind::kPlain) json["same_values"] = row.same_values;
    report.AddRow(std::move(json));
  }
}

void AddRows(const std::vector<PathRow>& rows, BenchReport& report) {
  for (const PathRow& row : rows) {
    const std::optional<double> of_captum = PathTimeOverCaptum(rows, row);
    report.AddRow({{"model", row.model},
                   {"preset", row.preset},
                   {"method", PathMethodName(row.way.method)},
                   {"way", row.way.is_pinion ? "pinion" : "captum"},
                   {"n_steps", row.way.n_steps},
                   {"budget_steps", row.way.budget_steps},
                   {"budget_mib", Mib(row.budget_bytes)},
                   {"peak_mib", Mib(row.peak_bytes)},
                   {"time_us", row.time_us},
                   {"of_captum", of_captum ? nlohmann::ordered_json(*of_captum) : nullptr},
                   {"forwards", row.forwards},
                   {"difference", row.difference}});
  }
}

void AddAttributionGoals(const AttributionTable& table, BenchReport& report) {
  for (const Method method : {Method::kGradientXActivation, Method::kActivation}) {
    report.AddGoal(absl::StrCat(AttributionWay{.method = method}.method_name(),
                                ": peak above the step's over the two largest captures"),
                   AtMost(1), table.rows, PeakOfAllowed(table, method));
  }
  for (const Kind kind : {Kind::kCaptumThenCpu, Kind::kCaptumMemoryEfficient}) {
    report.AddGoal(
        absl::StrCat("gradient x activation: time over ", AttributionWay{.kind = kind}.name()),
        AtMost(kFaster), table.rows, TimeOverCaptum(table, Method::kGradientXActivation, kind));
  }
  report.AddGoal("activation: time over captum, then .cpu()", AtMost(kFaster), table.rows,
                 TimeOverCaptum(table, Method::kActivation, Kind::kCaptumThenCpu));
  for (const Method method : {Method::kGradientXActivation, Method::kActivation}) {
    const Value over = TimeOverCaptum(table, method, Kind::kCaptum);
    const auto hidden = [&](const AttributionRow& row) {
      return IsHidden(table, row) ? over(row) : std::nullopt;
    };
    report.AddGoal(absl::StrCat(AttributionWay{.method = method}.method_name(),
                                ", where the link can hide the copies: time over captum"),
                   AtMost(kOfPlainDefault), table.rows, hidden);
  }
  report.AddGoal("MiB of the device that are held with Pinion's results", AtMost(0), table.rows,
                 [](const AttributionRow& row) {
                   return IsPinion(row) ? std::optional(Mib(row.cost.held_bytes)) : std::nullopt;
                 });
  report.AddNoneGoal("calls with other values than Captum's", table.rows,
                     [](const AttributionRow& row) { return IsPinion(row) && !row.same_values; });
  report.AddNoneGoal("calls whose products took no time on the host", table.rows,
                     [](const AttributionRow& row) {
                       return IsPinion(row) && row.way.method == Method::kGradientXActivation &&
                              row.cost.arithmetic_us == 0;
                     });
  AddPathGoals(table.paths, report);
}

namespace {

constexpr double kBytesPerUs = 1e3;  // of one GB/s

double TimeUs(uint64_t size_bytes, double gb_per_s) {
  return static_cast<double>(size_bytes) / (gb_per_s * kBytesPerUs);
}

}  // namespace

double CopyBoundUs(const std::vector<ReadyTensor>& tensors, double step_us,
                   const CopyRates& rates) {
  double host_us = 0;  // when the host is free
  double link_us = 0;  // when the link is free
  for (const ReadyTensor& tensor : tensors) {
    link_us = std::max(link_us, tensor.ready_us) + TimeUs(tensor.size_bytes, rates.link_gb_per_s);
    host_us =
        std::max(host_us, link_us) + TimeUs(tensor.arithmetic_bytes, rates.host_memory_gb_per_s);
  }
  return std::max(step_us, host_us);
}

}  // namespace pinion
