#include "pinion/bench/attribution/path_table.h"

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "pinion/allocator/base/bytes.h"

namespace pinion {
namespace {

// Pinion's copies to the host overlap the device's work.
constexpr double kOverBestGuess = 1.02;
// Few steps do not amortize Pinion's probing passes of one and eight rows, nor the last pass's
// copies to the host.
constexpr double kOverOneBatch = 1.1;
// Passes of other sizes sum float32 in another order.
constexpr double kRounding = 1e-5;

double PathMib(uint64_t bytes) { return static_cast<double>(bytes) / kMiB; }

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

using PathValue = std::function<std::optional<double>(const PathRow&)>;

// The maximum over Pinion's rows.
std::optional<double> MostOfPinions(const std::vector<PathRow>& rows, const PathValue& value) {
  std::optional<double> most;
  for (const PathRow& row : rows) {
    const std::optional<double> of_row = row.way.is_pinion ? value(row) : std::nullopt;
    if (of_row.has_value()) most = std::max(most.value_or(*of_row), *of_row);
  }
  return most;
}

std::optional<double> PathTimeOverCaptum(const std::vector<PathRow>& rows, const PathRow& row) {
  const PathRow* const captum = CaptumPathOf(rows, row);
  return captum != nullptr ? std::optional(row.time_us / captum->time_us) : std::nullopt;
}

}  // namespace

std::string PathMethodName(PathMethod method) {
  const char* const names[] = {"IntegratedGradients", "LayerIntegratedGradients",
                               "InternalInfluence", "LayerConductance", "LayerGradientShap"};
  return names[static_cast<int>(method)];
}

std::string PathText(const std::vector<PathRow>& rows) {
  std::string text = absl::StrFormat("%s on %s, within a budget (modelled)\n", rows.front().model,
                                     rows.front().preset);
  absl::StrAppendFormat(&text, "  %-26s %5s %10s  %-12s %9s %9s %9s %9s %6s %9s\n", "method",
                        "steps", "budget MiB", "way", "peak MiB", "time us", "of captum",
                        "of budget", "calls", "differs");
  for (const PathRow& row : rows) {
    absl::StrAppendFormat(
        &text, "  %-26s %5d %10.2f  %-12s %9.2f %9.0f %9.3f %9.3f %6d %9.1e\n",
        PathMethodName(row.way.method), row.way.n_steps, PathMib(row.budget_bytes),
        row.way.is_pinion        ? "pinion"
        : row.way.fits_at_once() ? "captum, one"
                                 : absl::StrCat("captum, ", row.way.budget_steps),
        PathMib(row.peak_bytes), row.time_us, PathTimeOverCaptum(rows, row).value_or(0),
        PathMib(row.peak_bytes) / PathMib(row.budget_bytes), row.forwards, row.difference);
  }
  return text;
}

void AddPathRows(const std::vector<PathRow>& rows, BenchReport& report) {
  for (const PathRow& row : rows) {
    report.AddRow({{"model", row.model},
                   {"preset", row.preset},
                   {"method", PathMethodName(row.way.method)},
                   {"way", row.way.is_pinion ? "pinion" : "captum"},
                   {"n_steps", row.way.n_steps},
                   {"budget_steps", row.way.budget_steps},
                   {"budget_mib", PathMib(row.budget_bytes)},
                   {"peak_mib", PathMib(row.peak_bytes)},
                   {"time_us", row.time_us},
                   {"forwards", row.forwards},
                   {"difference", row.difference}});
  }
}

void AddPathGoals(const std::vector<PathRow>& rows, BenchReport& report) {
  report.AddGoal("within a budget, at any number of steps: peak over the budget", AtMost(1),
                 MostOfPinions(rows, [](const PathRow& row) {
                   return std::optional(PathMib(row.peak_bytes) / PathMib(row.budget_bytes));
                 }));
  const auto over_captum = [&rows](bool fits_at_once) {
    return MostOfPinions(rows, [&rows, fits_at_once](const PathRow& row) {
      return row.way.fits_at_once() == fits_at_once ? PathTimeOverCaptum(rows, row) : std::nullopt;
    });
  };
  report.AddGoal("within a budget: time over captum with the largest internal_batch_size that fits",
                 AtMost(kOverBestGuess), over_captum(false));
  report.AddGoal("within a budget: time over captum's one batch where that just fits",
                 AtMost(kOverOneBatch), over_captum(true));
  report.AddGoal("within a budget: values' difference from captum's over the largest of them",
                 AtMost(kRounding), MostOfPinions(rows, [](const PathRow& row) {
                   return std::optional(row.difference);
                 }));
}

}  // namespace pinion
