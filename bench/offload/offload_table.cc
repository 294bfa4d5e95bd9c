#include "pinion/bench/offload/offload_table.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/bytes.h"

namespace pinion {
namespace {

using Kind = OffloadMethod::Kind;

// At most this bound over the step: the link can hide the copies.
constexpr double kHidden = 1.01;
// Share of the bound that a plan must reach, and of the offline plan if that is below the bound.
constexpr double kOfBound = 0.97;
constexpr double kOfOffline = 0.99;
// If TRL takes this much of the bound, a plan in its memory must be this much faster.
constexpr double kTrlIsSlow = 1.35;
constexpr double kFasterThanTrl = 1.3;
// Above this bound over the step, recomputation must beat the bound.
constexpr double kFarFromHidden = 1.2;
// The tolerance covers noise of the host's calls.
constexpr double kNotSlower = 1.001;

bool Binds(const OffloadRow& row) { return row.planned() && row.offline_us.has_value(); }

// Returns the reached over the required efficiency; at least 1 meets the goal.
double Reached(const OffloadRow& row) {
  const double of_bound = row.efficiency() / kOfBound;
  if (row.bound_us / *row.offline_us >= OffloadRow::kNearBound) return of_bound;
  return std::max(of_bound, *row.offline_us / row.cost.step_us / kOfOffline);
}

bool IsSameStep(const OffloadRow& a, const OffloadRow& b) {
  return a.model == b.model && a.preset == b.preset;
}

// Returns the run whose peak is the row's target.
const OffloadRow* PeerOf(const OffloadTable& table, const OffloadRow& of) {
  if (!of.at_the_peak_of.has_value()) return nullptr;
  for (const OffloadRow& row : table.rows) {
    if (IsSameStep(row, of) && row.method.kind == *of.at_the_peak_of &&
        row.cost.peak_bytes == of.method.bytes) {
      return &row;
    }
  }
  return nullptr;
}

// Returns the row's step over the step of the method whose peak is its target.
std::optional<double> OverPeer(const OffloadTable& table, const OffloadRow& row, Kind peer_kind) {
  const OffloadRow* const peer = PeerOf(table, row);
  if (peer == nullptr || peer->method.kind != peer_kind) return std::nullopt;
  return row.cost.step_us / peer->cost.step_us;
}

// Returns the row's step over the step without recomputation at the same target.
std::optional<double> OverPlanned(const OffloadTable& table, const OffloadRow& of) {
  if (of.method.kind != Kind::kPlannedRecompute) return std::nullopt;
  for (const OffloadRow& row : table.rows) {
    if (IsSameStep(row, of) && row.planned() && row.method.bytes == of.method.bytes) {
      return of.cost.step_us / row.cost.step_us;
    }
  }
  return std::nullopt;
}

std::optional<double> OverFarBound(const OffloadRow& row) {
  if (row.method.kind != Kind::kPlannedRecompute || row.bound_us <= kFarFromHidden * row.alone_us) {
    return std::nullopt;
  }
  return row.cost.step_us / row.bound_us;
}

nlohmann::ordered_json CommonJson(const std::string& model, const std::string& preset,
                                  const OffloadMethod& method, const MethodCost& cost) {
  nlohmann::ordered_json json = {{"model", model}, {"preset", preset}, {"method", method.name()}};
  if (method.bytes > 0) json["target_mib"] = Mib(method.bytes);
  json["peak_mib"] = Mib(cost.peak_bytes);
  json["step_us"] = cost.step_us;
  json["stall_us"] = cost.stall_us;
  json["moved_mib"] = Mib(cost.moved_bytes);
  return json;
}

}  // namespace

nlohmann::ordered_json JsonOf(const OffloadRow& row) {
  nlohmann::ordered_json json = CommonJson(row.model, row.preset, row.method, row.cost);
  json["alone_us"] = row.alone_us;
  json["of_none"] = row.cost.step_us / row.alone_us;
  if (std::isfinite(row.bound_us)) {
    json["bound_us"] = row.bound_us;
    json["efficiency"] = row.efficiency();
  }
  if (row.plan_us.has_value()) json["plan_us"] = *row.plan_us;
  if (row.offline_us.has_value()) json["offline_us"] = *row.offline_us;
  if (row.method.kind == Kind::kPlannedRecompute) json["computed_again"] = row.computed_again;
  if (row.at_the_peak_of.has_value()) {
    json["target_of"] = OffloadMethod{*row.at_the_peak_of}.name();
  }
  return json;
}

nlohmann::ordered_json JsonOf(const ValuesRow& row) {
  nlohmann::ordered_json json = CommonJson(row.model, row.preset, row.method, row.cost);
  json["same_bits"] = row.same_bits;
  return json;
}

void AddOffloadGoals(const OffloadTable& table, BenchReport& report) {
  using Value = std::optional<double>;
  const auto add = [&](std::string name, Bound bound, const auto& value) {
    report.AddGoal(std::move(name), bound, table.rows, value);
  };
  add("planned: efficiency over 0.97, or over 0.99 of the offline plan's where that is below 0.98",
      AtLeast(1), [](const OffloadRow& row) { return Binds(row) ? Value(Reached(row)) : Value(); });
  add("planned: peak over target", AtMost(1), [](const OffloadRow& row) {
    return row.method.has_target() ? Value(Mib(row.cost.peak_bytes) / Mib(row.method.bytes))
                                   : Value();
  });
  add("planned, where the link can hide it: step over none", AtMost(1.02),
      [](const OffloadRow& row) {
        const bool hidden = row.bound_us <= kHidden * row.alone_us;
        return row.planned() && hidden ? Value(row.cost.step_us / row.alone_us) : Value();
      });
  for (const Kind kind : {Kind::kTrl, Kind::kWindows}) {
    add(absl::StrCat("planned, at the peak of ", OffloadMethod{kind}.name(), ": step over its"),
        AtMost(kNotSlower), [&](const OffloadRow& row) {
          return row.planned() ? OverPeer(table, row, kind) : Value();
        });
  }
  add("where trl takes 1.35 of the bound: its step over the planned one", AtLeast(kFasterThanTrl),
      [&](const OffloadRow& row) {
        const OffloadRow* const peer = PeerOf(table, row);
        if (peer == nullptr || !row.planned() || peer->method.kind != Kind::kTrl ||
            peer->cost.step_us < kTrlIsSlow * peer->bound_us) {
          return Value();
        }
        return Value(peer->cost.step_us / row.cost.step_us);
      });
  add("planned, with recompute: step over planned at the same target", AtMost(kNotSlower),
      [&](const OffloadRow& row) { return OverPlanned(table, row); });
  for (const Kind kind : {Kind::kCheckpoint, Kind::kTrlCheckpoint}) {
    add(absl::StrCat("planned, with recompute, at the peak of ", OffloadMethod{kind}.name(),
                     ": step over its"),
        AtMost(kNotSlower), [&](const OffloadRow& row) { return OverPeer(table, row, kind); });
  }
  const auto far_from_hidden =
      std::count_if(table.rows.begin(), table.rows.end(),
                    [](const OffloadRow& row) { return OverFarBound(row).has_value(); });
  add(absl::StrCat("planned, with recompute, of ", far_from_hidden,
                   " runs whose bound is over 1.2 of none: step over bound"),
      AtMost(1), OverFarBound);
  std::optional<double> other_bits;
  for (const ValuesRow& row : table.values) {
    if (row.method.gives_other_strides()) continue;
    other_bits = other_bits.value_or(0) + (row.same_bits ? 0 : 1);
  }
  report.AddGoal("runs with values, but for TRL's, that give gradients of other bits", AtMost(0),
                 other_bits);
  report.AddGoal("minutes for the table", AtMost(20), table.minutes);
}

}  // namespace pinion
