// What a training step does with bytes that may rest on the host meanwhile: which of them it uses,
// in what order, and what lies between. Bounds and plans are made from it.
//
//   interval 0 | use 0 | interval 1 | use 1 | ... | use n-1 | interval n
//
//   StepTrace step;
//   step.objects = {{.size_bytes = 4 << 20}};        // one saved tensor, ...
//   step.accesses = {0, 0};                              // saved and read
//   step.intervals = {{.compute_us = 100}, {.compute_us = 50}, {.compute_us = 200}};
//   PINION_RETURN_IF_ERROR(step.Validate());
//
// An object is bytes that are used as a whole. The interval before its first use makes it. Whatever
// never leaves the device (parameters, gradients, the temporary tensors of operators) is no object
// and counts among the other bytes of each interval.
//
// A use is known by its ordinal, its place in the row, and an object by the ordinal of its first
// use among those of all objects. Steps that do the same have the same ordinals, so that a schedule
// can speak of uses that have not happened yet.
//
// Plain data; hooks/plan/step_recorder.h records it.

#ifndef PINION_ENGINE_PLANNER_STEP_TRACE_H_
#define PINION_ENGINE_PLANNER_STEP_TRACE_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace pinion {

struct StepObject {
  uint64_t size_bytes = 0;  // that it takes on the device, and about what a copy moves; never 0
  // False: somebody else holds the device memory, so that dropping the object frees nothing.
  bool frees = true;
  // Set: it does not move. While it is away nobody has it, and it takes so long to compute it again
  // from what stays when it is read: a weight that autocast has cast.
  std::optional<double> recast_us = std::nullopt;
  // The last interval in which somebody may still ask for it, where that is behind those of its
  // uses: a graph that is kept needs what it will not read. 0: its uses say it all, and what is
  // never read is needed to the end.
  uint32_t needed_until = 0;
  // The ordinal of the last use that saves it. Whoever saves it again has held it until then, so
  // that it cannot be away before. 0: only its first use saves it.
  uint32_t saved_until = 0;
  // The last interval in which the program holds it for itself, so that dropping it frees nothing
  // before: a layer's input, until the layer returns. 0: its saves say it all.
  uint32_t held_until = 0;
  // Who reads it needs memory of its own for it, so that it shares no copy with others.
  bool comes_alone = false;
  // By size, type and place in the graph: a later step that has another one here does something
  // else.
  uint64_t signature = 0;
};

// Compute between two uses, without any wait for a copy.
struct StepInterval {
  double compute_us = 0;
  // On the device at its end, beside all objects; what dropping cannot free is part of it.
  uint64_t other_bytes = 0;
  // And so much more at its peak: what operators take and give back.
  uint64_t transient_bytes = 0;
  // An object counts in all of an interval that uses it. Of those that the interval's operator is
  // the last to need, so many bytes have gone before the interval's peak.
  uint64_t released_bytes = 0;

  // What has to fit in beside all objects that count.
  uint64_t peak_other_bytes() const { return other_bytes + transient_bytes - released_bytes; }
};

// Part of a forward that can run again: instead of keeping what it saves, a step may compute that
// again when the first of it is read.
struct StepSegment {
  // What it saved, and the reads of that, ascending. Empty where it was computed again.
  std::vector<uint32_t> accesses;
  // What it needs to run again: objects, or, from objects.size() on, unsaved inputs.
  std::vector<uint32_t> inputs;
  // That of the interval before its first use which had passed when it began, if it was seen to
  // begin: beside all objects that are used before, and its inputs.
  std::optional<StepInterval> before = std::nullopt;
  // The step was recorded with this segment computed again: that is part of its intervals, and the
  // segments inside of it did not begin, but keep their places.
  bool is_recomputed = false;
  // The innermost segment that this one is inside of, and to whose uses its own belong as well.
  std::optional<uint32_t> outer = std::nullopt;
};

// Whether segment `inner` is inside of segment `outer`, by index.
bool IsInside(absl::Span<const StepSegment> segments, uint32_t inner, uint32_t outer);

// By segment: it was kept, and all that is inside of it.
std::vector<bool> KeptWhole(absl::Span<const StepSegment> segments);

// What segments need to run again, and nobody saves. Until its end it is among the other bytes; it
// becomes an object where such a segment is computed again.
struct UnsavedInput {
  uint64_t size_bytes = 0;
  uint32_t held_until = 0;  // the last interval in which it is there
  bool frees = true;        // as StepObject has it
};

struct StepTrace {
  std::vector<StepObject> objects;  // in the order of their first uses
  std::vector<uint32_t> accesses;   // objects by index
  // By use, a number of the operator that makes or reads the object; those next to each other with
  // the same number are one operator's, which has what it uses until the next operator's first use.
  // Empty: each use is an operator of its own.
  std::vector<uint32_t> operators;
  std::vector<StepInterval> intervals;  // one more than there are uses
  std::vector<StepSegment> segments;    // in the order in which they begin
  std::vector<UnsavedInput> unsaved_inputs = {};
  uint32_t early_segments = 0;  // of these, those that begin before the first use
  // It adds to gradients that were there when it began, and takes other memory than one that makes
  // them.
  bool begins_with_gradients = false;
  // Uses, ascending, that are reads of a backward which keeps its graph and makes another one: that
  // takes more memory.
  std::vector<uint32_t> graph_reads = {};
  // The device could not time its streams, so `compute_us` is the host's time between calls, which
  // are made ahead of the device: good for an order of magnitude at best.
  bool timed_by_host = false;

  double compute_us() const;  // of all intervals
  // The same step, with so much more on the device that never leaves.
  StepTrace WithMore(uint64_t size_bytes) const;

  // InvalidArgument names the object, use or interval that breaks a rule above, its value, and what
  // it has to be.
  absl::Status Validate() const;
};

}  // namespace pinion

#endif  // PINION_ENGINE_PLANNER_STEP_TRACE_H_
