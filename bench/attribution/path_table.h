// What attribution_bench has measured of the methods that run a model at many points along a path:
// rows, their text, and the goals that they are judged by.
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

// Who computes what.
struct PathWay {
  PathMethod method = PathMethod::kIntegratedGradients;
  int64_t n_steps = 0;  // or samples
  // The memory that it may have: what Captum takes for one batch of so many steps.
  int64_t budget_steps = 0;
  bool is_pinion =
      false;  // with that as device_budget_bytes; or Captum in batches of so many steps

  // Captum needs no internal_batch_size.
  bool fits_at_once() const { return n_steps <= budget_steps; }
};

// Of one call, once all memory that later calls need is pinned.
struct PathRow {
  std::string model;   // OffloadModel::name()
  std::string preset;  // the device's, before it was scaled
  PathWay way;
  uint64_t budget_bytes = 0;
  uint64_t peak_bytes = 0;  // of the whole device, as the budget is
  double time_us = 0;       // modelled; Captum's results stay on the device, Pinion's do not
  int64_t forwards = 0;     // calls of the model
  // From what Captum has computed first for so many steps, over the largest of those values.
  double difference = 0;
};

// The rows of one model on one preset, with a heading.
std::string PathText(const std::vector<PathRow>& rows);
void AddPathRows(const std::vector<PathRow>& rows, BenchReport& report);
void AddPathGoals(const std::vector<PathRow>& rows, BenchReport& report);

}  // namespace pinion

#endif  // PINION_BENCH_ATTRIBUTION_PATH_TABLE_H_
