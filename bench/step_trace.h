// Records the trace that StepLowerBoundMs needs from a training step without offload on the
// emulated accelerator.
//
//   StepTraceRecorder recorder(machine, /*device=*/0, parameters_of(model));
//   {
//     SavedTensorScope scope(recorder.packer());
//     loss = forward();
//   }
//   recorder.EndForward();
//   loss.backward();
//   StepTrace trace = recorder.Finish();
//
// Saved tensors are kept as they are. The device is synchronised at every save and every read, so
// the step's own time means nothing; what is recorded is compute alone.
//
// Thread safety: one step at a time, on one device: autograd hands it from the thread that runs
// forward to its worker and back.

#ifndef PINION_BENCH_STEP_TRACE_H_
#define PINION_BENCH_STEP_TRACE_H_

#include <memory>

#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/plan/step_bound.h"
#include "pinion/hooks/activations/offload_policy.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"

namespace pinion {

class StepTraceRecorder {
 public:
  // Storages in `parameters` are not counted: no policy moves them.
  StepTraceRecorder(std::shared_ptr<EmulatedMachine> machine, int device,
                    ParameterStorages parameters);
  ~StepTraceRecorder();

  std::shared_ptr<SavedTensorPacker> packer();
  void EndForward();
  StepTrace Finish();

 private:
  class Recording;
  std::shared_ptr<Recording> recording_;
};

}  // namespace pinion

#endif  // PINION_BENCH_STEP_TRACE_H_
