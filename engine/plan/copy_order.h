// In which order the copies out of a plan go over the link: those whose memory has to go first go
// first.
//
//   std::vector<StepMove> ordered = InOrderOfDrops(step, plan.moves, times);
//
// Copies of one direction go one after the other, so that one which is made early and dropped late
// may keep others waiting whose memory is needed sooner. Of the copies that could begin when the
// link is free, by `times`, the one that is dropped first goes first (the rule of the earliest
// deadline). Where an object is to go behind one that is made later, its move says when
// (StepMove::copy_at).
//
// Thread safety: a pure function.

#ifndef PINION_ENGINE_PLAN_COPY_ORDER_H_
#define PINION_ENGINE_PLAN_COPY_ORDER_H_

#include <vector>

#include "pinion/engine/plan/step_plan.h"
#include "pinion/engine/plan/step_record.h"
#include "pinion/engine/plan/step_simulation.h"

namespace pinion {

// `times` are those of the moves in some order.
std::vector<StepMove> InOrderOfDrops(const StepRecord& step, std::vector<StepMove> moves,
                                     const StepTimes& times);

}  // namespace pinion

#endif  // PINION_ENGINE_PLAN_COPY_ORDER_H_
