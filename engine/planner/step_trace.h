// Trace of one training step: which objects it accesses, in which order, and what it computes
// between two accesses. Plans and bounds are computed from it.
//
//   interval 0 | access 0 | interval 1 | access 1 | ... | access n-1 | interval n
//
//   StepTrace step;
//   step.objects = {{.size_bytes = 4 << 20}};        // one saved tensor, ...
//   step.accesses = {0, 0};                          // saved and read
//   step.intervals = {{.compute_us = 100}, {.compute_us = 50}, {.compute_us = 200}};
//   PINION_RETURN_IF_ERROR(step.Validate());
//
// An object is memory that is accessed as a whole, such as a saved tensor. The interval before its
// first access creates it. Memory that never leaves the device is no object: parameters, gradients
// and temporaries of operators count among the other bytes of each interval.
//
// An access is identified by its index in the sequence, an object by the rank of its first access.
// Equal steps have equal indices, so a schedule can refer to accesses that have not happened yet.
//
// Plain data. hooks/plan/step_recorder.h records it.

#ifndef PINION_ENGINE_PLANNER_STEP_TRACE_H_
#define PINION_ENGINE_PLANNER_STEP_TRACE_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace pinion {

struct StepObject {
  uint64_t size_bytes = 0;  // on the device, and about what a copy moves; never 0
  // False: the device memory is externally referenced, so evicting the object frees nothing.
  bool frees = true;
  // Set for a weight that autocast has cast: the object is not copied. It is discarded, and the
  // read recasts the weight, which takes this long.
  std::optional<double> recast_us = std::nullopt;
  // Last interval in which a reader may still ask for the object, if that is after its last access.
  // A retained graph needs what it will not read. 0: the accesses decide. An object that is
  // never read is then needed to the end.
  uint32_t needed_until = 0;
  // Index of the last access that saves the object. It cannot be offloaded before. 0: only the
  // first access saves it.
  uint32_t saved_until = 0;
  // Last interval in which the program itself references the object, so that evicting it frees
  // nothing before: a layer's input, until the layer returns. 0: the saves decide.
  uint32_t held_until = 0;
  // The reader needs memory of its own for the object, so it shares no copy with others.
  bool comes_alone = false;
  // Hash of size, type and place in the graph. A later step with another signature here is another
  // step.
  uint64_t signature = 0;
};

// Compute between two accesses, without waits for copies.
struct StepInterval {
  double compute_us = 0;
  // Device memory at the end, beside all objects. Includes what evicting cannot free.
  uint64_t other_bytes = 0;
  // Additional bytes at the peak: temporaries of operators.
  uint64_t transient_bytes = 0;
  // An object counts in all of an interval that accesses it. These bytes of last-used objects were
  // freed before the interval's peak although the interval still counts them.
  uint64_t released_bytes = 0;

  // Bytes that have to fit beside all counted objects.
  uint64_t peak_other_bytes() const { return other_bytes + transient_bytes - released_bytes; }
};

// Part of a forward that can run again. Instead of keeping what the segment saves, a step may
// recompute it at the first read.
struct StepSegment {
  // Its saves and their reads, ascending. Empty if the segment was recomputed.
  std::vector<uint32_t> accesses;
  // What the second run needs: objects, or, from objects.size() on, unsaved inputs.
  std::vector<uint32_t> inputs;
  // The part of the interval before its first access that had passed when the segment began. Its
  // other bytes leave out all earlier objects and the inputs. Empty if the begin was not seen.
  std::optional<StepInterval> before = std::nullopt;
  // The step was recorded with this segment recomputed. The second run is part of the step's
  // intervals. Inner segments did not begin, but keep their indices.
  bool is_recomputed = false;
  // The innermost enclosing segment, whose accesses include those of this one.
  std::optional<uint32_t> outer = std::nullopt;
};

// Returns whether segment `inner` lies inside segment `outer`; both are indices.
bool IsInside(absl::Span<const StepSegment> segments, uint32_t inner, uint32_t outer);

// By segment: true if the segment and all inner ones were kept.
std::vector<bool> KeptWhole(absl::Span<const StepSegment> segments);

// The most that memory was seen to grow between an access and the next one. The object that the
// next access makes counts.
struct StepGrowth {
  uint32_t access = 0;
  uint64_t size_bytes = 0;
};

struct StepTrace {
  std::vector<StepObject> objects;  // in the order of their first accesses
  std::vector<uint32_t> accesses;   // indices of objects
  // By access: number of the operator that makes or reads the object. Neighbours with the same
  // number belong to one operator, which uses its objects until the next operator's first access.
  // Empty: each access is an operator of its own.
  std::vector<uint32_t> operators;
  std::vector<StepInterval> intervals;  // one more than there are accesses
  std::vector<StepSegment> segments;    // in the order in which they begin
  // Inputs of segments that no operator saves. Such an input counts among the other bytes until
  // `held_until`, the last interval with it. It becomes an object if its segment is recomputed.
  std::vector<StepObject> unsaved_inputs = {};
  uint32_t early_segments = 0;  // segments that begin before the first access
  // The step adds to gradients that existed before it. Such a step takes other memory than one that
  // creates them.
  bool begins_with_gradients = false;
  // Accesses, ascending, that are reads of a backward with create_graph. Such a backward takes more
  // memory.
  std::vector<uint32_t> graph_reads = {};
  // The device could not time its streams. `compute_us` is then the host's time between calls, an
  // order of magnitude at best.
  bool timed_by_host = false;

  // The intervals as they were recorded, the last record first, if those above were raised since
  // (WithMore, TakeMostOf).
  std::vector<std::vector<StepInterval>> records = {};
  // By access: the room that LeaveRoom was told of, or by which a record grew more than the record
  // before it. Empty: none.
  std::vector<uint64_t> growths = {};

  double compute_us() const;  // of all intervals
  // Returns an object or an unsaved input, as StepSegment::inputs numbers them.
  const StepObject& ObjectOrInput(uint32_t number) const {
    return number < objects.size() ? objects[number] : unsaved_inputs[number - objects.size()];
  }
  // Raises the memory of each interval to that of `before`, the record of a step with the same
  // accesses. Two steps may differ in memory alone, because small tensors are no objects, and take
  // turns. `before` counts as it was recorded, so that only two records in a row matter. Growths of
  // `before` last.
  void TakeMostOf(const StepTrace& before);
  // Raises the memory of an interval: some step, for example one of four, takes more there than the
  // recorded one.
  void LeaveRoom(const StepGrowth& growth);
  // By access: how much memory grows until the next one in a record of this step.
  std::vector<uint64_t> GrowthsOf(const std::vector<StepInterval>& record) const;
  // Returns the same step with `size_bytes` more of other bytes everywhere.
  StepTrace WithMore(uint64_t size_bytes) const;

  // InvalidArgument names the object, access or interval that breaks a rule above, its value, and
  // the remedy.
  absl::Status Validate() const;
};

}  // namespace pinion

#endif  // PINION_ENGINE_PLANNER_STEP_TRACE_H_
