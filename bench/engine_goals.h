// The goals of engine_bench.
//
// Pure.

#ifndef PINION_BENCH_ENGINE_GOALS_H_
#define PINION_BENCH_ENGINE_GOALS_H_

#include <vector>

#include "pinion/bench/engine_cases.h"
#include "pinion/bench/goals.h"
#include "pinion/engine/link/link_curve.h"

namespace pinion {

// The least number of "many small pieces": with fewer, one transfer's fixed costs dominate.
inline constexpr uint64_t kManyPieces = 64;

// The link's curves, without the engine.
struct LinkCurves {
  LinkCurve d2h;
  LinkCurve h2d;
};

// Returns the goals of sections with rows. A value is the worst of its rows, or nullopt if rows are
// missing. Single copies have no goal: the link hides the engine's events and waits only back to
// back.
std::vector<Goal> EngineGoals(const std::vector<BenchRow>& rows, const LinkCurves& link);

}  // namespace pinion

#endif  // PINION_BENCH_ENGINE_GOALS_H_
