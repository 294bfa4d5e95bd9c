// Rows and goals of offload_bench.
//
// Plain data and pure functions.

#ifndef PINION_BENCH_OFFLOAD_OFFLOAD_TABLE_H_
#define PINION_BENCH_OFFLOAD_OFFLOAD_TABLE_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "pinion/bench/goals.h"
#include "pinion/bench/offload/offload_method.h"

namespace pinion {

// One method on one step: replayed, or run with values.
struct OffloadRow {
  std::string model;   // OffloadModel::name()
  std::string preset;  // the device's, before it was scaled
  OffloadMethod method = {};
  MethodCost cost = {};
  double alone_us = 0;  // the replayed step without offload
  // Lower bound of policies that recompute nothing and start copies after the operator returned
  // (programs/step_bound.h). The memory is the target, or the peak of a method without one.
  // Infinite if no policy fits.
  double bound_us = 0;
  // kPlanned, if the target binds: the time of the shortest plan that a long search finds. A plan
  // near the bound replaces the search.
  static constexpr double kNearBound = 0.98;
  std::optional<double> offline_us = std::nullopt;
  size_t computed_again = 0;  // kPlannedRecompute: recomputed segments
  // The method whose peak is this row's target.
  std::optional<OffloadMethod::Kind> at_the_peak_of = std::nullopt;
  // With values: gradients equal those without offload.
  std::optional<bool> same_bits = std::nullopt;

  // Above 1 only with recomputation, or with copies that start before the saving operator returned
  // (TRL). Infinite if the bound is.
  double efficiency() const { return bound_us / cost.step_us; }
  bool planned() const { return method.kind == OffloadMethod::Kind::kPlanned; }
};

struct OffloadTable {
  std::vector<OffloadRow> rows = {};
  std::vector<OffloadRow> values = {};
  double minutes = 0;  // of wall time, for all of it
};

// Returns a row's fields in the report.
nlohmann::ordered_json JsonOf(const OffloadRow& row);

// Adds the goals.
void AddOffloadGoals(const OffloadTable& table, BenchReport& report);

}  // namespace pinion

#endif  // PINION_BENCH_OFFLOAD_OFFLOAD_TABLE_H_
