#include "pinion/bench/hooks_report.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "pinion/bench/statistics.h"

namespace pinion {
namespace {

template <typename Row, typename Value>
std::optional<double> Worst(const std::vector<Row>& rows, Value value) {
  std::optional<double> worst;
  for (const Row& row : rows) {
    const std::optional<double> found = value(row);
    if (found.has_value()) worst = std::max(worst.value_or(*found), *found);
  }
  return worst;
}

}  // namespace

std::string HooksCase::Name() const {
  return absl::StrCat(leaves ? "leaves" : "fits", "/", step.tensors, "x",
                      absl::StrReplaceAll(HumanBytes(step.tensor_bytes), {{" ", ""}}), "/", threads,
                      threads == 1 ? "_thread" : "_threads");
}

BenchReport HooksReport(const std::vector<HooksRow>& rows,
                        const std::vector<RecordedStepCost>& recorded) {
  BenchReport report;
  // The median of all rows: caches hide this tenth of a microsecond in some rows, and hooks that do
  // nothing cost the same in all.
  std::vector<double> all_nothing_us;
  for (const HooksRow& row : rows) all_nothing_us.push_back(row.nothing_us);
  const double nothing_us = rows.empty() ? 0 : Summarize(std::move(all_nothing_us)).median;
  // Returns nullopt if noise made the baseline zero or less.
  const auto over = [](double us, double baseline_us) -> std::optional<double> {
    if (baseline_us <= 0) return std::nullopt;
    return us / baseline_us;
  };
  const auto ratio = [&](const HooksRow& row) { return over(row.pinion_us, nothing_us); };
  for (const HooksRow& row : rows) {
    report.AddRow({{"case", row.of.Name()},
                   {"leaves", row.of.leaves},
                   {"tensors", row.of.step.tensors},
                   {"tensor_bytes", row.of.step.tensor_bytes},
                   {"threads", row.of.threads},
                   {"none_us", row.none_us},
                   {"nothing_us", row.nothing_us},
                   {"pinion_us", row.pinion_us},
                   {"ratio", ratio(row).value_or(0)},
                   {"device_calls", row.device_calls},
                   {"capture_queries", row.capture_queries},
                   {"capture_queries_side", row.capture_queries_side}});
  }
  const auto of_size = [&rows](bool small, double HooksRow::*field) {
    return Worst(rows, [=](const HooksRow& row) -> std::optional<double> {
      if ((row.of.step.tensor_bytes == kSmallBytes) != small) return std::nullopt;
      return row.*field;
    });
  };
  report.AddGoal("a saved tensor: Pinion's hooks over hooks that do nothing", AtMost(10),
                 Worst(rows, ratio));
  report.AddGoal(absl::StrCat("a saved tensor of ", kManyTensors, " over one of ", kFewTensors),
                 AtMost(1.2), Worst(rows, [&](const HooksRow& many) -> std::optional<double> {
                   if (many.of.step.tensors != kManyTensors) return std::nullopt;
                   HooksCase few = many.of;
                   few.step.tensors = kFewTensors;
                   for (const HooksRow& row : rows) {
                     if (row.of.Name() == few.Name()) return over(many.pinion_us, row.pinion_us);
                   }
                   return std::nullopt;
                 }));
  report.AddGoal("events, waits and copies of a large tensor", AtMost(10),
                 of_size(/*small=*/false, &HooksRow::device_calls));
  report.AddGoal("capture queries of a large tensor, on the default stream", AtMost(1),
                 of_size(/*small=*/false, &HooksRow::capture_queries));
  report.AddGoal("events, waits and copies of a small tensor", AtMost(2),
                 of_size(/*small=*/true, &HooksRow::device_calls));
  report.AddGoal("capture queries of a small tensor, on the default stream", AtMost(0.2),
                 of_size(/*small=*/true, &HooksRow::capture_queries));
  for (const RecordedStepCost& cost : recorded) report.AddRow(cost.ToRow());
  report.AddGoal("a recorded step over the same one that is not recorded (host)", AtMost(1.05),
                 Worst(recorded, [](const RecordedStepCost& cost) {
                   return std::optional<double>(cost.ratio());
                 }));
  return report;
}

}  // namespace pinion
