// Replays a recorded training step without values. Tensors of the recorded sizes are allocated,
// saved, read and freed in the recorded order, through autograd and the active hooks. The device
// computes as long and allocates as much temporary memory.
//
//   PINION_ASSIGN_OR_RETURN(auto step, ReplayedStep::Create(record, machine));
//   step->Run([&] { return std::make_shared<OffloadScope>(session); });
//   machine->now_ms(), machine->memory_stats(0).peak_bytes
//
// No operator runs, so a replay takes a thousandth of the model's time. A tensor that the program
// holds is freed at the end of the last operator that saves it. Each interval is one kernel, so the
// host runs further ahead. The record has neither fact.
//
// Thread safety: none; one step at a time.

#ifndef PINION_BENCH_OFFLOAD_REPLAYED_STEP_H_
#define PINION_BENCH_OFFLOAD_REPLAYED_STEP_H_

#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/planner/step_trace.h"

namespace pinion {

class ReplayedStep {
 public:
  // Returns an object that lives through forward, or null.
  using MakeScope = std::function<std::shared_ptr<void>()>;

  // Replays on device 0 of `machine`, which is registered as "emu" with DevicePreset::launch_us 0.
  // InvalidArgument if the record is not one forward and its backward.
  static absl::StatusOr<std::unique_ptr<ReplayedStep>> Create(
      StepTrace record, std::shared_ptr<EmulatedMachine> machine);
  virtual ~ReplayedStep() = default;

  // Throws LibTorch's errors, and c10::Error for the device's.
  virtual void Run(const MakeScope& make_scope) = 0;
};

}  // namespace pinion

#endif  // PINION_BENCH_OFFLOAD_REPLAYED_STEP_H_
