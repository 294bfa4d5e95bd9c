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
// The recorder works beside any packer and does not change what it does. The record describes the
// step as if nothing were offloaded: a session's waits, frees and fetches are excluded. Open the
// RecordScope around the OffloadScope. Inside it, work at the end of the OffloadScope counts as
// compute.
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
// Other live bytes are those that LibTorch's allocator of the device has given out, at each access.
// Memory that operators allocate and free in between is visible if the allocator reports it to
// profilers and no other profiler runs (hooks/autograd/memory_observer.h). Otherwise
// StepInterval::transient_bytes counts memory that existed at the interval's begin only.
// A profiler may run before a RecordScope begins, and may start when it has ended, but not inside.
//
// Recording costs some microseconds per save: record a step now and then.
//
// Not recorded: saves inside a backward, during a graph capture, and under Python's hooks.
//
// Thread safety: StepRecorder is thread-safe. A scope belongs to the thread that made it, like an
// OffloadScope. Threads that save on one device at a time share a record, in an order that differs
// from step to step.
// Ownership: graphs share the recording and may outlive the recorder.

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
  // InvalidArgument if LibTorch does not know the backend's device type, and for a backend of an
  // emulated machine that is not the registered one. Unimplemented if LibTorch's allocator does not
  // report its bytes.
  static absl::StatusOr<std::shared_ptr<StepRecorder>> Create(DeviceBackend backend);
  virtual ~StepRecorder() = default;

  // What was recorded since the last call, by device, after waiting for the devices to get there.
  // The last interval ends here. Reads of graphs that are left are not recorded any more. The
  // errors of a device that is broken, or that does not get there within a minute.
  // FailedPrecondition, with nothing lost, while a current stream captures a graph.
  virtual absl::StatusOr<std::map<int, StepTrace>> Finish() = 0;
};

// Records what autograd saves on this thread. A step may have several scopes in a row, which may
// end before it is finished; places in the graph count from the first scope's beginning. Of nested
// scopes the innermost records.
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
