// The ways of offloading that offload_bench and step_bench compare, and what one of them makes of a
// step.
//
//   PINION_ASSIGN_OR_RETURN(const MethodCost cost,
//                           RunMethod({OffloadMethod::Kind::kPlanned, target_bytes}, world, make));
//
// Thread safety: none: RunMethod registers an emulated machine of its own as "emu".

#ifndef PINION_BENCH_OFFLOAD_OFFLOAD_METHOD_H_
#define PINION_BENCH_OFFLOAD_OFFLOAD_METHOD_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "pinion/bench/offload/replayed_step.h"
#include "pinion/device/device_backend.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/planner/step_trace.h"

namespace pinion {

struct OffloadMethod {
  enum class Kind {
    kNone,
    kBlocking,      // the host waits for each copy, as save_on_cpu does
    kTrl,           // bench/peers/trl_offload.h
    kGraphTrainer,  // bench/peers/graph_offload.h
    kWindows,       // a session without a target
    kPlanned,       // a session with one
    // Of a step that computes each block of the model again in backward:
    kCheckpoint,     // all else stays
    kTrlCheckpoint,  // TRL has the blocks' inputs, and what is saved outside of them
    // A session with a target, whose plan says which blocks are computed again.
    kPlannedRecompute,
  };
  Kind kind = Kind::kNone;
  uint64_t bytes = 0;  // the target; kGraphTrainer: of the host, that it may take

  // "none", "blocking", "trl", "graph trainer", "windows", "planned", "checkpoint every block",
  // "trl with checkpoint", "planned, with recompute"
  std::string name() const;
  bool has_target() const { return kind == Kind::kPlanned || kind == Kind::kPlannedRecompute; }
  // What was not contiguous comes back contiguous: some kernels sum in another order then.
  bool gives_other_strides() const { return kind == Kind::kTrl || kind == Kind::kTrlCheckpoint; }
  // Whether every block of the model is a checkpoint.
  bool checkpoints() const { return kind == Kind::kCheckpoint || kind == Kind::kTrlCheckpoint; }
};

// What all runs on one device have in common.
struct MethodWorld {
  DevicePreset preset;
  LinkCalibration link;  // of that device
  uint64_t memory_bytes = uint64_t{4} << 30;
};

// Of one step, once all that is learned is known.
struct MethodCost {
  double step_us = 0;   // modelled
  double stall_us = 0;  // the same
  // Of the device: of a planned step's first ones, too, which the target is for as well.
  uint64_t peak_bytes = 0;
  uint64_t moved_bytes = 0;  // over the link, both directions
};

// A step on device 0 of the machine, which is registered, and what it is given.
struct OffloadStep {
  std::function<void(const ReplayedStep::MakeScope&)> run;
  std::vector<std::vector<at::Tensor>> layers;  // parameters of each
  std::vector<at::Tensor> inputs;               // other parameters, and the batch
};
using MakeStep =
    std::function<absl::StatusOr<OffloadStep>(const std::shared_ptr<EmulatedMachine>& machine)>;

// The replay of a record, as ReplayedStep::Create.
MakeStep ReplayOf(StepTrace record, int layers,
                  ReplayedStep::Readers readers = ReplayedStep::Readers::kNodes);

// Where a method runs.
struct MethodDevice {
  c10::Device device;
  DeviceBackend backend;
  std::optional<LinkCalibration> link = std::nullopt;  // none: a session measures it
};

// What a method has active throughout a step, and throughout its forward; any objects.
struct MethodScopes {
  ReplayedStep::MakeScope step = [] { return nullptr; };
  ReplayedStep::MakeScope forward = [] { return nullptr; };
};

// For steps of that kind. Errors are those of the session.
absl::StatusOr<MethodScopes> ScopesOf(const OffloadMethod& method, const MethodDevice& on,
                                      const OffloadStep& step);

// Errors are those of the machine and of the session, and what LibTorch throws.
absl::StatusOr<MethodCost> RunMethod(const OffloadMethod& method, const MethodWorld& world,
                                     const MakeStep& make_step);

// What a session finds out of the link of such a device.
absl::StatusOr<LinkCalibration> LinkOf(const DevicePreset& preset);

}  // namespace pinion

#endif  // PINION_BENCH_OFFLOAD_OFFLOAD_METHOD_H_
