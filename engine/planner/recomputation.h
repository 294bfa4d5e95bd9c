// A step as it would be if some of its segments were computed again instead of kept.
//
//   StepTrace shorter = WithRecomputation(step, {0, 2});    // segments by index
//
// Before it begins the segment's inputs are saved. What it alone saves is there in forward as long
// as the program holds it, and is gone then. Where the first of it is read, the segment's inputs
// are read in its place and the interval behind takes as much longer as forward took from the
// segment's begin to its last save. From there on the tensors that were made again count among the
// other bytes, each until it is read for the last time in the segment. At its peak the second run
// takes what the first one took beside what was there when it began.
//
// That is what a plan can know before it is tried. It errs towards more memory, since what a real
// run lets go of in the middle of an interval counts to its end; but no record tells that a segment
// which waits to be computed again holds what it has captured.
//
// Thread safety: a pure function.

#ifndef PINION_ENGINE_PLANNER_RECOMPUTATION_H_
#define PINION_ENGINE_PLANNER_RECOMPUTATION_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "pinion/engine/planner/step_trace.h"

namespace pinion {

// Segments by index, ascending: those that were kept, with all inside of them, and seen to begin,
// and of which something was read that is none of their inputs, by one backward: another one would
// compute the segment once more.
std::vector<uint32_t> RecomputableSegments(const StepTrace& step);

// Of a valid record, without segments. `segments` are some that can be computed again, none of them
// inside of another.
StepTrace WithRecomputation(const StepTrace& step, absl::Span<const uint32_t> segments);

}  // namespace pinion

#endif  // PINION_ENGINE_PLANNER_RECOMPUTATION_H_
