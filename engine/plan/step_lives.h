// When the objects of a step are on the device, if nothing is moved: what bounds and plans share.

#ifndef PINION_ENGINE_PLAN_STEP_LIVES_H_
#define PINION_ENGINE_PLAN_STEP_LIVES_H_

#include <cstddef>
#include <vector>

#include "pinion/engine/plan/step_record.h"

namespace pinion {

// One object's life, as places in the row of stretches.
struct ObjectLife {
  size_t made = 0;             // the first stretch with it
  size_t over = 0;             // the last one
  std::vector<size_t> in_use;  // ascending; in the others, it may be away
  std::vector<size_t> uses;    // their ordinals
  bool is_read = false;        // after it was made
};

// By object, of a valid record. An object is in use throughout the stretch that makes it,
// throughout the stretch behind each later use, until it is saved for the last time, and until the
// program lets go of it.
std::vector<ObjectLife> LivesOf(const StepRecord& step);

// By object: the use from which on it can leave. What an operator saves may still be written until
// it has returned, which is known when another one saves something, and of all when a forward is
// over. An object that is saved once more before that waits for that operator, too.
std::vector<size_t> LeavesFrom(const StepRecord& step);

// By use: the last one of the same operator.
std::vector<size_t> OperatorEnds(const StepRecord& step);

}  // namespace pinion

#endif  // PINION_ENGINE_PLAN_STEP_LIVES_H_
