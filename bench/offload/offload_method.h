// Methods of offloading that offload_bench and step_bench compare, and the cost of a step with one.
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
    kBlocking,          // the host waits for each copy, as save_on_cpu does
    kTrl,               // bench/peers/trl_offload.h
    kWindows,           // a session without a target
    kPlanned,           // a session with a target
    kCheckpoint,        // recomputes each block of the model in backward, and offloads nothing
    kPlannedRecompute,  // a session with a target, whose plan selects recomputed blocks
  };
  Kind kind = Kind::kNone;
  uint64_t bytes = 0;  // the target

  // "none", "blocking", "trl", "windows", "planned", "checkpoint every block", "planned, with
  // recompute"
  std::string name() const;
  bool has_target() const { return kind == Kind::kPlanned || kind == Kind::kPlannedRecompute; }
  // Tensors return contiguous, so some kernels sum in another order.
  bool gives_other_strides() const { return kind == Kind::kTrl; }
};

// The inputs that all runs on one device share.
struct MethodWorld {
  DevicePreset preset;
  LinkCalibration link;  // of the preset's link
  uint64_t memory_bytes = uint64_t{4} << 30;
};

// The cost of one step after warm-up.
struct MethodCost {
  double step_us = 0;   // modelled
  double stall_us = 0;  // modelled
  // Device peak. Includes the recorded steps of a planned session: the target holds for them too.
  uint64_t peak_bytes = 0;
  uint64_t moved_bytes = 0;  // over the link, both directions
};

// A step on device 0 of the registered machine.
struct OffloadStep {
  std::function<void(const ReplayedStep::MakeScope&)> run;
  std::vector<at::Tensor> parameters;  // which TRL keeps on the device
};
using MakeStep =
    std::function<absl::StatusOr<OffloadStep>(const std::shared_ptr<EmulatedMachine>& machine)>;

// The replay of a record, as ReplayedStep::Create.
MakeStep ReplayOf(StepTrace record);

// The device of a method.
struct MethodDevice {
  c10::Device device;
  DeviceBackend backend;
  std::optional<LinkCalibration> link = std::nullopt;  // nullopt: a session measures it
};

// Objects that live throughout a method's step, and throughout its forward.
struct MethodScopes {
  ReplayedStep::MakeScope step = [] { return nullptr; };
  ReplayedStep::MakeScope forward = [] { return nullptr; };
};

// Returns the scopes of a method for steps with these parameters. Errors: those of the session.
absl::StatusOr<MethodScopes> ScopesOf(const OffloadMethod& method, const MethodDevice& on,
                                      const std::vector<at::Tensor>& parameters);

// Returns a machine of the world, registered as "emu". It detects no races: tests do.
absl::StatusOr<std::shared_ptr<EmulatedMachine>> NewMachine(const MethodWorld& world);

// Errors: those of the machine and the session, and LibTorch's exceptions.
absl::StatusOr<MethodCost> RunMethod(const OffloadMethod& method, const MethodWorld& world,
                                     const MakeStep& make_step);

// Returns the calibration that a session measures on this preset.
absl::StatusOr<LinkCalibration> LinkOf(const DevicePreset& preset);

}  // namespace pinion

#endif  // PINION_BENCH_OFFLOAD_OFFLOAD_METHOD_H_
