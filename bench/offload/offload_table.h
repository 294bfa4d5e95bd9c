// What offload_bench has measured: rows, their text, and the goals that they are judged by.
//
// Plain data and pure functions.

#ifndef PINION_BENCH_OFFLOAD_OFFLOAD_TABLE_H_
#define PINION_BENCH_OFFLOAD_OFFLOAD_TABLE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "pinion/bench/goals.h"
#include "pinion/bench/offload/offload_method.h"

namespace pinion {

// One method on one step.
struct OffloadRow {
  std::string model;   // OffloadModel::name()
  std::string preset;  // the device's, before it was scaled
  OffloadMethod method;
  MethodCost cost;
  double alone_us = 0;  // the step without offload
  // No policy takes less that computes nothing again and copies nothing before its operator has
  // returned (programs/step_bound.h), in this memory: the target, and the peak of a method that
  // has none. Infinite where none can do with that memory.
  double bound_us = 0;
  // Of a step whose target binds: what its plan comes to by itself, and the shortest plan that a
  // long search finds, which computes nothing again. Where the plan is near the bound nothing is
  // looked for: it stands for both.
  static constexpr double kNearBound = 0.98;
  std::optional<double> plan_us;
  std::optional<double> offline_us;  // kPlanned
  size_t computed_again = 0;         // kPlannedRecompute: blocks
  // A step in the memory that this method took at its peak.
  std::optional<OffloadMethod::Kind> at_the_peak_of;

  // Above 1 only of a step that computes something again, or copies what an operator saves before
  // that has returned (TRL, the graph trainer). Infinite if the bound is.
  double efficiency() const { return bound_us / cost.step_us; }
  bool planned() const { return method.kind == OffloadMethod::Kind::kPlanned; }
};

// One step with values: whether gradients had the bits of the step without offload.
struct ValuesRow {
  std::string model;
  std::string preset;
  OffloadMethod method = {};
  MethodCost cost = {};
  bool same_bits = false;
};

struct OffloadTable {
  std::vector<OffloadRow> rows = {};
  std::vector<ValuesRow> values = {};
  double minutes = 0;  // of wall time, for all of it
};

// One step's rows, with a heading.
std::string OffloadText(const std::vector<OffloadRow>& rows);
std::string ValuesText(const std::vector<ValuesRow>& rows);
BenchReport OffloadReport(const OffloadTable& table);

}  // namespace pinion

#endif  // PINION_BENCH_OFFLOAD_OFFLOAD_TABLE_H_
