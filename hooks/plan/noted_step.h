// What a recording has noted of a step, entry by entry, and the StepTrace that comes of it.
//
//   StepTrace step = StepOf(entries, objects, times);
//
// Thread safety: pure functions, except that NoteGone writes its objects.

#ifndef PINION_HOOKS_PLAN_NOTED_STEP_H_
#define PINION_HOOKS_PLAN_NOTED_STEP_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/types/span.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/engine/stream/stream_clock.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/autograd/saved_version.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/plan/device_peaks.h"
#include "pinion/hooks/plan/known_storages.h"

namespace pinion {

struct NotedObject {
  StepObject planned;
  KnownStorages::Id storage = 0;
  const void* data = nullptr;  // the storage's memory when first saved
  SavedVersion version;
  StorageExtent extent;
  uint64_t storage_bytes = 0;  // size of the whole storage
  bool is_leaf = false;
  bool is_computed_again = false;
  bool is_readers = false;  // its memory counts as a reader's (LeaveToReader)
  bool is_decided = false;  // whether planned.frees is final
  int handles = 0;
  std::vector<const SavedTensor*> saved = {};  // handles whose packer still owns the memory
  size_t first_use = 0;
  size_t last_save = 0;        // a use, too
  size_t let_go = 0;           // the interval in which the program let go of it; 0: not seen
  size_t gone_by = 0;          // the entry by which others took its place then; 0: none did
  size_t uses_at_release = 0;  // of all objects, when the last handle went

  bool IsNeededLongerThan(const NotedObject& other) const {
    if (handles > 0 || other.handles > 0) return handles > 0 && other.handles == 0;
    return uses_at_release > other.uses_at_release;
  }
};

// An input of a kept segment. It need not be saved by any operator.
struct NotedInput {
  uint32_t segment = 0;
  KnownStorages::Id storage = 0;
  SavedVersion version;
  StorageExtent extent;
  bool is_leaf = false;
  size_t begin = 0;   // the interval in which the segment began
  size_t let_go = 0;  // the interval in which its memory went, or the step ended
};

// One action of a packer. The time between its begin and end is not the step's.
struct NotedEntry {
  StreamClock::Moment begin = {};
  StreamClock::Moment end = {};
  std::optional<uint32_t> used = std::nullopt;      // the object that was saved or read
  std::optional<uint32_t> released = std::nullopt;  // the object whose last handle went
  std::optional<uint32_t> begins = std::nullopt;    // the segment, which is kept
  bool computed_again = false;                      // by who read it
  bool into_graph = false;                          // a read, as StepTrace::graph_reads has it
  uint64_t by = 0;                                  // which operator has used it, by any number
  std::optional<SegmentPart> part = std::nullopt;   // of forward, in which it was saved or begins
  int64_t other_bytes = 0;
  int64_t peak_other_bytes = 0;  // since the previous entry
  int64_t object_bytes = 0;      // on the device, after the entry
};

// Decides for objects that the program freed since the last moment (`since`) whether a plan may
// count them as resident until `entry`. It may not if later allocations reused their memory, since
// a resident object needs room beside them: then sets `gone_by` to `entry`.
void NoteGone(const DevicePeaks::Since& since, absl::Span<NotedObject* const> gone, size_t entry);

// The first entry is the step's begin, the last one its end. `times` are those of each entry's
// begin and end, in turn.
StepTrace StepOf(absl::Span<const NotedEntry> entries, absl::Span<const NotedObject> objects,
                 absl::Span<const NotedInput> inputs, const StreamClock::Times& times);

}  // namespace pinion

#endif  // PINION_HOOKS_PLAN_NOTED_STEP_H_
