// Rows and goals of attribution_bench, and a lower bound on its times.
//
// Plain data and pure functions.

#ifndef PINION_BENCH_ATTRIBUTION_ATTRIBUTION_TABLE_H_
#define PINION_BENCH_ATTRIBUTION_ATTRIBUTION_TABLE_H_

#include <cstdint>
#include <string>
#include <vector>

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

  std::string method_name() const;  // "gradient x activation", "activation"
  std::string name() const;         // "captum, then .cpu()", "pinion"
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
  double bound_us = 0;             // CopyBoundUs
  bool same_values = true;         // as Captum's
};

enum class PathMethod {
  kIntegratedGradients,
  kLayerIntegratedGradients,
  kLayerConductance,
};
std::string PathMethodName(PathMethod method);  // "IntegratedGradients"

// A method, and the implementation that computes it.
struct PathWay {
  PathMethod method = PathMethod::kIntegratedGradients;
  int64_t n_steps = 0;
  // The budget: Captum's peak for one batch of this many steps.
  int64_t budget_steps = 0;
  bool is_pinion = false;  // device_budget_bytes is the budget; else Captum's batches

  // Returns whether Captum needs no internal_batch_size.
  bool fits_at_once() const { return n_steps <= budget_steps; }
};

// The cost of one call after pools have filled.
struct PathRow {
  std::string model;   // OffloadModel::name()
  std::string preset;  // the device's, before it was scaled
  PathWay way;
  uint64_t budget_bytes = 0;
  uint64_t peak_bytes = 0;  // of the whole device
  double time_us = 0;       // modelled; Captum's results stay on the device, Pinion's do not
  int64_t forwards = 0;     // calls of the model
  // Largest difference from Captum's first result for this many steps, relative to its largest
  // value.
  double difference = 0;
};

struct AttributionTable {
  std::vector<AttributionRow> rows = {};
  std::vector<PathRow> paths = {};
};

// Add the rows of one model on one preset, and the goals, to the report.
void AddRows(const std::vector<AttributionRow>& rows, BenchReport& report);
void AddRows(const std::vector<PathRow>& rows, BenchReport& report);
void AddAttributionGoals(const AttributionTable& table, BenchReport& report);

struct ReadyTensor {
  double ready_us = 0;            // since the step began
  uint64_t size_bytes = 0;        // copied over the link
  uint64_t arithmetic_bytes = 0;  // of host memory, read and written once the tensor is there
};

struct CopyRates {
  double link_gb_per_s = 0;
  double host_memory_gb_per_s = 0;
};

// Returns a lower bound on the time of attribution with results on the host. `tensors` are in the
// order of ready_us; the step alone takes `step_us`.
//
// Tensors become ready during the step. They cross one link in order, at its bandwidth and without
// fixed costs. The host computes with each tensor after its copy.
double CopyBoundUs(const std::vector<ReadyTensor>& tensors, double step_us, const CopyRates& rates);

}  // namespace pinion

#endif  // PINION_BENCH_ATTRIBUTION_ATTRIBUTION_TABLE_H_
