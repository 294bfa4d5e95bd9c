// Records what a step of training saves and reads, for those who plan: as one StepTrace for each
// device (engine/planner/step_trace.h).
//
//   PINION_ASSIGN_OR_RETURN(auto recorder, StepRecorder::Create(CudaBackend()));
//   {
//     RecordScope record(recorder);
//     OffloadScope scope(session, *model);           // or none
//     loss = model->forward(x);
//   }
//   loss.backward();
//   PINION_ASSIGN_OR_RETURN(auto steps, recorder->Finish());
//   const StepTrace& step = steps[0];               // of device 0
//
// It stands beside whatever packs the saved tensors, and changes nothing of what they do. The
// record is of the step as if nothing was offloaded: a session's waits, and the memory that it lets
// go of and fetches, are taken out. Open a RecordScope around the OffloadScope: inside of it works
// as well, but what a session does at its scope's end then counts as compute.
//
// What is an object: the bytes that an OffloadScope without a module would move, by the default
// options. Parameters, what is small and what is of another kind of device are none, and count
// among the other live bytes. Views of the same bytes at the same version are uses of one object.
// An object frees nothing if somebody else holds its storage when the backward that has read it
// ends. What it takes to compute one again is not known.
//
// Compute is timed on the device, by an event before and one behind each save, read and release,
// which are read in Finish: the device is not synchronised before. A device without such events
// gives the host's time, and StepTrace::timed_by_host says so. Compute begins where RecordScope
// does on the device that is current there, and on others with their first save. What is submitted
// between two events counts, so that a device that idles for the host's calls idles in the record,
// too.
//
// Other live bytes are those that LibTorch's allocator of the device has given out, at each use.
// What operators take and give back in between is seen where the allocator reports it to profilers
// and nobody else is in their place (hooks/autograd/memory_observer.h); elsewhere
// StepInterval::transient_bytes is what was there at the interval's begin and has gone at its end.
// A profiler may run before a RecordScope begins, and may start when it has ended, but not inside.
//
// A step costs some microseconds a save more: record a step now and then, not each.
//
// Not recorded: what is saved inside a backward, while a stream captures a graph, and under hooks
// of Python.
//
// Thread safety: StepRecorder is thread-safe; a scope belongs to the thread that made it, as
// OffloadScope does. Several threads that save on one device at a time share one record, in the
// order in which they come, which then differs from step to step.
// Ownership: graphs share ownership of what records them, and may outlive the recorder.

#ifndef PINION_HOOKS_PLAN_STEP_RECORDER_H_
#define PINION_HOOKS_PLAN_STEP_RECORDER_H_

#include <map>
#include <memory>

#include "absl/status/statusor.h"
#include "pinion/device/device_backend.h"
#include "pinion/engine/planner/step_trace.h"

namespace pinion {

class StepRecorder {
 public:
  // InvalidArgument where LibTorch knows no device type of the backend's name; Unimplemented where
  // its allocator does not tell how many bytes are live.
  static absl::StatusOr<std::shared_ptr<StepRecorder>> Create(DeviceBackend backend);
  virtual ~StepRecorder() = default;

  // What was recorded since the last call, by device, after waiting for the devices to get there.
  // The last interval ends here. Reads of graphs that are left are not recorded any more. The
  // errors of a device that is broken, or that does not get there within a minute.
  // FailedPrecondition, with nothing lost, while a current stream captures a graph.
  virtual absl::StatusOr<std::map<int, StepTrace>> Finish() = 0;
};

// While it lives, what autograd saves on this thread is recorded. Scopes may be opened one after
// the other for one step, and end before it is finished: the places of what is saved count from the
// first one's beginning. Of nested ones the innermost records.
class [[nodiscard]] RecordScope {
 public:
  [[nodiscard]] explicit RecordScope(const std::shared_ptr<StepRecorder>& recorder);
  ~RecordScope();
  RecordScope(const RecordScope&) = delete;
  RecordScope& operator=(const RecordScope&) = delete;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace pinion

#endif  // PINION_HOOKS_PLAN_STEP_RECORDER_H_
