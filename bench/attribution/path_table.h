// Rows and goals of attribution_bench for methods along a path, and their text.
//
// Plain data and pure functions.

#ifndef PINION_BENCH_ATTRIBUTION_PATH_TABLE_H_
#define PINION_BENCH_ATTRIBUTION_PATH_TABLE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "pinion/bench/goals.h"

namespace pinion {

enum class PathMethod {
  kIntegratedGradients,
  kLayerIntegratedGradients,
  kInternalInfluence,
  kLayerConductance,
  kLayerGradientShap,
};
std::string PathMethodName(PathMethod method);  // "IntegratedGradients"

// A method, and the implementation that computes it.
struct PathWay {
  PathMethod method = PathMethod::kIntegratedGradients;
  int64_t n_steps = 0;  // or samples
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

// The rows of one model on one preset, with a heading.
std::string PathText(const std::vector<PathRow>& rows);
void AddPathRows(const std::vector<PathRow>& rows, BenchReport& report);
void AddPathGoals(const std::vector<PathRow>& rows, BenchReport& report);

}  // namespace pinion

#endif  // PINION_BENCH_ATTRIBUTION_PATH_TABLE_H_
