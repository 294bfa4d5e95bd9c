// A step of training that was recorded, played again without its values: tensors of the same sizes
// are made, saved, read and let go of in the same order, through LibTorch's autograd and whatever
// hooks are active; the device computes for as long, and takes and gives back as much memory
// besides.
//
//   PINION_ASSIGN_OR_RETURN(auto step, ReplayedStep::Create(record, machine, /*layers=*/6));
//   step->Run([&] { return std::make_shared<OffloadScope>(session); });
//   machine->now_ms(), machine->memory_stats(0).peak_bytes
//
// So a method of offloading meets what it would meet in the model, in a thousandth of the time: no
// operator runs. What the record does not tell is left out: when the program lets go of a tensor
// that it has saved (taken for the end of the operator that saves it last), and how many kernels
// there were (one for each interval, so that the host is further ahead than it was).
//
// Thread safety: none; one step at a time.

#ifndef PINION_BENCH_OFFLOAD_REPLAYED_STEP_H_
#define PINION_BENCH_OFFLOAD_REPLAYED_STEP_H_

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/planner/step_trace.h"

namespace pinion {

class ReplayedStep {
 public:
  // Any object that lives as long as the forward; null for none.
  using MakeScope = std::function<std::shared_ptr<void>()>;

  // Who reads what was saved. A checkpoint has its inputs until the last node of its segment has
  // run, which is not the node that has read them: a method that lets go of what a node has read,
  // once that node has run, finds it in use.
  enum class Readers { kNodes, kCheckpoints };

  // On device 0 of the machine, which is registered as "emu" and whose kernels cost nothing beside
  // what they compute (DevicePreset::launch_us is 0). InvalidArgument for a record that is not one
  // forward and its backward.
  static absl::StatusOr<std::unique_ptr<ReplayedStep>> Create(
      StepTrace record, std::shared_ptr<EmulatedMachine> machine, int layers,
      Readers readers = Readers::kNodes);
  virtual ~ReplayedStep() = default;

  // LibTorch's errors are thrown, and the device's as c10::Error.
  virtual void Run(const MakeScope& make_scope) = 0;

  // By layer, what stands for its parameters: for methods that tell layers apart by them. The
  // record does not know layers: each saves as many tensors as the others.
  virtual const std::vector<at::Tensor>& layer_parameters() const = 0;
};

}  // namespace pinion

#endif  // PINION_BENCH_OFFLOAD_REPLAYED_STEP_H_
