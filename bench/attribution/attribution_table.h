// What attribution_bench has measured: rows, their text, and the goals that they are judged by.
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

// Who computes what.
struct AttributionWay {
  enum class Method { kGradientXActivation, kActivation };
  enum class Kind {
    kPlain,          // the forward, and the backward if there is one, that attribution needs
    kCaptum,         // results stay on the device
    kCaptumThenCpu,  // and are then brought to the host
    kCaptumMemoryEfficient,  // memory_efficient=True
    kPinion,
  };
  Method method = Method::kGradientXActivation;
  Kind kind = Kind::kPlain;
  bool in_scope = false;  // forward runs in an OffloadScope

  std::string method_name() const;  // "gradient x activation", "activation"
  std::string name() const;         // "captum, then .cpu()", "pinion, in a scope"
};

// Of one call, once all memory that later calls need is pinned.
struct AttributionCost {
  double time_us = 0;         // modelled, until results are where they are to be
  double arithmetic_us = 0;   // of that, what the host's arithmetic was charged
  uint64_t peak_bytes = 0;    // of the device
  uint64_t held_bytes = 0;    // of the device, more than before the call while results are held
  uint64_t copied_bytes = 0;  // to the host
};

struct AttributionRow {
  std::string model;   // OffloadModel::name()
  std::string preset;  // the device's, before it was scaled
  AttributionWay way;
  AttributionCost cost;
  uint64_t captured_bytes = 0;     // of the layers' values, and of their gradients if there are any
  uint64_t two_largest_bytes = 0;  // of those tensors
  double bound_us = 0;             // bench/attribution/copy_bound.h: of who has memory for all,
  double bound_of_two_us = 0;      // and of who has it for the two largest
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
