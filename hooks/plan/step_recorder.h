// Records what a training step saves and reads, as input for planners: one StepRecord per device
// (engine/plan/step_record.h).
//
//   PINION_ASSIGN_OR_RETURN(auto recorder, StepRecorder::Create(CudaBackend()));
//   {
//     RecordScope record(recorder);
//     OffloadScope scope(session, *model);           // or none
//     loss = model->forward(x);
//   }
//   loss.backward();
//   PINION_ASSIGN_OR_RETURN(auto steps, recorder->Finish());
//   const StepRecord& step = steps[0];               // of device 0
//
// The recorder works beside any packer and does not change what it does. The record describes the
// step as if nothing were offloaded: a session's waits, frees and fetches are excluded. Open the
// RecordScope around the OffloadScope. Inside it, work at the end of the OffloadScope counts as
// compute.
//
// Objects are the bytes that an OffloadScope without a module would offload by default. Parameters,
// small tensors and tensors on other types of device count as other live bytes. Views of the same
// bytes at one version are accesses to one object. An object frees nothing if its storage has
// another owner when the backward that read it ends. All objects originate on the device, and none
// is clean. Only recasts have a recomputation time.
//
// Compute is timed on the device by events around each save, read and release, which Finish reads;
// the device is not synchronised before. A device without timed events gets the host's time, and
// StepRecord::timed_by_host is true. Compute begins at the RecordScope on the device that is
// current there, on other devices at their first save. Idle time of the device counts as compute.
//
// Other live bytes are the bytes of LibTorch's allocator at each access, without the objects. Peaks
// in between are seen if the allocator reports them and no profiler takes the reports
// (hooks/autograd/memory_observer.h). Otherwise StepStretch::transient_bytes is the drop from the
// interval's begin to its end. A profiler may run before the RecordScope begins or start after it,
// but must not start inside.
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
#include "pinion/engine/plan/step_record.h"

namespace pinion {

class StepRecorder {
 public:
  // InvalidArgument if LibTorch does not know the backend's device type. Unimplemented if its
  // allocator does not report its bytes.
  static absl::StatusOr<std::shared_ptr<StepRecorder>> Create(DeviceBackend backend);
  virtual ~StepRecorder() = default;

  // Returns the records since the last call, by device index, and ends their last interval. Waits
  // until the devices are done, at most a minute. Later reads of remaining graphs are not recorded.
  // Returns errors of the devices. FailedPrecondition while a current stream captures a graph; then
  // nothing is lost.
  virtual absl::StatusOr<std::map<int, StepRecord>> Finish() = 0;
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
