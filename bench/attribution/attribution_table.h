// Rows and goals of attribution_bench, and their text.
//
// Plain data and pure functions.

#ifndef PINION_BENCH_ATTRIBUTION_ATTRIBUTION_TABLE_H_
#define PINION_BENCH_ATTRIBUTION_ATTRIBUTION_TABLE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "pinion/bench/attribution/path_table.h"
#include "pinion/bench/goals.h"

namespace pinion {

// A method, and the implementation that computes it.
struct AttributionWay {
  enum class Method { kGradientXActivation, kActivation };
  enum class Kind {
    kPlain,          // the forward, and the backward if there is one, that attribution needs
    kCaptum,         // results stay on the device
    kCaptumThenCpu,  // results are then copied to the host
    kCaptumMemoryEfficient,  // memory_efficient=True
    kPinion,
  };
  Method method = Method::kGradientXActivation;
  Kind kind = Kind::kPlain;
  bool in_scope = false;  // forward runs in an OffloadScope

  std::string method_name() const;  // "gradient x activation", "activation"
  std::string name() const;         // "captum, then .cpu()", "pinion, in a scope"
};

// The cost of one call after pools have filled.
struct AttributionCost {
  double time_us = 0;         // modelled, until the results are complete
  double arithmetic_us = 0;   // of time_us: charged for host arithmetic
  uint64_t peak_bytes = 0;    // of the device
  uint64_t held_bytes = 0;    // device bytes that live results keep
  uint64_t copied_bytes = 0;  // to the host
};

struct AttributionRow {
  std::string model;   // OffloadModel::name()
  std::string preset;  // the device's, before it was scaled
  AttributionWay way;
  AttributionCost cost;
  uint64_t captured_bytes = 0;     // layers' values and gradients
  uint64_t two_largest_bytes = 0;  // the two largest captures
  double bound_us = 0;             // bench/attribution/copy_bound.h: memory for all,
  double bound_of_two_us = 0;      // and memory for the two largest
  bool same_values = true;         // as Captum's
};

struct AttributionTable {
  std::vector<AttributionRow> rows = {};
  std::vector<PathRow> paths = {};
  double minutes = 0;  // of wall time, for all of it
};

// The rows of one model on one preset, with a heading.
std::string AttributionText(const std::vector<AttributionRow>& rows);
BenchReport AttributionReport(const AttributionTable& table);

}  // namespace pinion

#endif  // PINION_BENCH_ATTRIBUTION_ATTRIBUTION_TABLE_H_
