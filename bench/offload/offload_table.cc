#include "pinion/bench/offload/offload_table.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"

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

}  // namespace

nlohmann::ordered_json JsonOf(const OffloadRow& row) {
  nlohmann::ordered_json json = {
      {"model", row.model}, {"preset", row.preset}, {"method", row.method.name()}};
  if (row.method.bytes > 0) json["target_mib"] = Mib(row.method.bytes);
  json["peak_mib"] = Mib(row.cost.peak_bytes);
  json["step_us"] = row.cost.step_us;
  json["stall_us"] = row.cost.stall_us;
  json["moved_mib"] = Mib(row.cost.moved_bytes);
  if (row.same_bits.has_value()) {
    json["same_bits"] = *row.same_bits;
    return json;
  }
  json["alone_us"] = row.alone_us;
  json["of_none"] = row.cost.step_us / row.alone_us;
  if (std::isfinite(row.bound_us)) {
    json["bound_us"] = row.bound_us;
    json["efficiency"] = row.efficiency();
  }
  if (row.offline_us.has_value()) json["offline_us"] = *row.offline_us;
  if (row.method.kind == Kind::kPlannedRecompute) json["computed_again"] = row.computed_again;
  if (row.at_the_peak_of.has_value()) {
    json["target_of"] = OffloadMethod{*row.at_the_peak_of}.name();
  }
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
  add("planned, with recompute, at the peak of checkpoint every block: step over its",
      AtMost(kNotSlower),
      [&](const OffloadRow& row) { return OverPeer(table, row, Kind::kCheckpoint); });
  add("planned, with recompute, where the bound is over 1.2 of none: step over bound", AtMost(1),
      OverFarBound);
  report.AddNoneGoal("runs with values, but for TRL's, that give gradients of other bits",
                     table.values, [](const OffloadRow& row) {
                       return !row.method.gives_other_strides() && row.same_bits == false;
                     });
  report.AddGoal("minutes for the table", AtMost(20), table.minutes);
}

}  // namespace pinion
