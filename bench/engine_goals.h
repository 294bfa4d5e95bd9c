// What engine_bench's rows must show.
//
// Pure.

#ifndef PINION_BENCH_ENGINE_GOALS_H_
#define PINION_BENCH_ENGINE_GOALS_H_

#include <vector>

#include "pinion/bench/engine_cases.h"
#include "pinion/bench/goals.h"
#include "pinion/engine/link/link_curve.h"

namespace pinion {

// How many pieces "many small pieces" are: below, one transfer's fixed costs are all there is.
inline constexpr uint64_t kManyPieces = 64;

// The link alone, without anything that is measured here.
struct LinkCurves {
  LinkCurve d2h;
  LinkCurve h2d;
};

// Of the sections that have rows. Each value is the worst of the rows that it is about; it is left
// out where such rows are missing.
std::vector<Goal> EngineGoals(const std::vector<BenchRow>& rows, const LinkCurves& link);

}  // namespace pinion

#endif  // PINION_BENCH_ENGINE_GOALS_H_
