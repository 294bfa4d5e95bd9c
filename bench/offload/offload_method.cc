#include "pinion/bench/offload/offload_method.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/bench/bench_main.h"
#include "pinion/bench/peers/trl_offload.h"
#include "pinion/device/emulated/emulated_backend.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/programs/accelerator.h"
#include "pinion/programs/pool_options.h"

namespace pinion {
namespace {

// Warm-up: sessions record steps and measure saved bytes, pools fill.
constexpr int kWarmupSteps = 5;
constexpr int kSteps = 2;

absl::StatusOr<std::shared_ptr<OffloadSession>> NewSession(const OffloadMethod& method,
                                                           const MethodDevice& on) {
  OffloadOptions options;
  options.allocator = PoolWithoutWatermarks();
  options.link = on.link;
  options.overlap = method.kind != OffloadMethod::Kind::kBlocking;
  if (method.has_target()) options.memory_target_bytes = method.bytes;
  return OffloadSession::Create(options, on.backend);
}

absl::StatusOr<MethodCost> Measure(const OffloadStep& step, const MethodScopes& scopes,
                                   bool every_peak_counts, EmulatedMachine& machine) {
  const auto run = [&] {
    const std::shared_ptr<void> scope = scopes.step();
    step.run(scopes.forward);
  };
  for (int i = 0; i < kWarmupSteps; ++i) run();
  PINION_RETURN_IF_ERROR(machine.SynchronizeDevice(0));
  machine.ResetTimeStats(0);
  if (!every_peak_counts) machine.ResetPeakMemory(0);
  const double begin_ms = machine.now_ms();
  for (int i = 0; i < kSteps; ++i) {
    run();
    PINION_RETURN_IF_ERROR(machine.SynchronizeDevice(0));
  }
  const TimeStats times = machine.time_stats(0);
  return MethodCost{.step_us = (machine.now_ms() - begin_ms) * 1e3 / kSteps,
                    .stall_us = times.stalled_on_copies_ms * 1e3 / kSteps,
                    .peak_bytes = machine.memory_stats(0).peak_bytes,
                    .moved_bytes = (times.h2d_bytes + times.d2h_bytes) / kSteps};
}

}  // namespace

std::string OffloadMethod::name() const {
  const char* const names[] = {"none",
                               "blocking",
                               "trl",
                               "windows",
                               "planned",
                               "checkpoint every block",
                               "planned, with recompute"};
  return names[static_cast<int>(kind)];
}

absl::StatusOr<std::shared_ptr<EmulatedMachine>> NewMachine(const MethodWorld& world) {
  EmulatedOptions options;
  options.preset = world.preset;
  options.memory_bytes = world.memory_bytes;
  options.detect_races = false;
  PINION_ASSIGN_OR_RETURN(std::shared_ptr<EmulatedMachine> machine,
                          EmulatedMachine::Create(options));
  PINION_RETURN_IF_ERROR(RegisterNextMachine(machine));
  return machine;
}

MakeStep ReplayOf(StepTrace record) {
  return [record = std::move(record)](
             const std::shared_ptr<EmulatedMachine>& machine) -> absl::StatusOr<OffloadStep> {
    PINION_ASSIGN_OR_RETURN(std::shared_ptr<ReplayedStep> step,
                            ReplayedStep::Create(record, machine));
    return OffloadStep{[step](const ReplayedStep::MakeScope& make_scope) { step->Run(make_scope); },
                       {}};
  };
}

absl::StatusOr<MethodScopes> ScopesOf(const OffloadMethod& method, const MethodDevice& on,
                                      const std::vector<at::Tensor>& parameters) {
  MethodScopes scopes;
  switch (method.kind) {
    case OffloadMethod::Kind::kNone:
    case OffloadMethod::Kind::kCheckpoint:
      break;
    case OffloadMethod::Kind::kBlocking:
    case OffloadMethod::Kind::kWindows:
    case OffloadMethod::Kind::kPlanned:
    case OffloadMethod::Kind::kPlannedRecompute: {
      PINION_ASSIGN_OR_RETURN(const std::shared_ptr<OffloadSession> session,
                              NewSession(method, on));
      scopes.forward = [session] { return std::make_shared<OffloadScope>(session); };
      break;
    }
    case OffloadMethod::Kind::kTrl: {
      const auto trl =
          std::make_shared<TrlOffload>(TrlOptions{.parameters = parameters}, on.device);
      scopes.step = [trl] { return std::make_shared<TrlScope>(trl); };
      break;
    }
  }
  return scopes;
}

absl::StatusOr<MethodCost> RunMethod(const OffloadMethod& method, const MethodWorld& world,
                                     const MakeStep& make_step) {
  const std::string what =
      absl::StrCat(method.name(), " ", HumanBytes(method.bytes), " on ", world.preset.name);
  return NoThrow(what, [&]() -> absl::StatusOr<MethodCost> {
    PINION_ASSIGN_OR_RETURN(const std::shared_ptr<EmulatedMachine> machine, NewMachine(world));
    PINION_ASSIGN_OR_RETURN(const OffloadStep step, make_step(machine));
    const MethodDevice on = {.device = {DeviceTypeOf("emu").value(), 0},
                             .backend = EmulatedBackend(machine),
                             .link = world.link};
    PINION_ASSIGN_OR_RETURN(const MethodScopes scopes, ScopesOf(method, on, step.parameters));
    return Measure(step, scopes, method.has_target(), *machine);
  });
}

absl::StatusOr<LinkCalibration> LinkOf(const DevicePreset& preset) {
  PINION_ASSIGN_OR_RETURN(const std::shared_ptr<EmulatedMachine> machine,
                          NewMachine({.preset = preset, .link = {}}));
  OffloadOptions options;
  options.allocator = PoolWithoutWatermarks();
  PINION_ASSIGN_OR_RETURN(const std::shared_ptr<OffloadSession> session,
                          OffloadSession::Create(options, EmulatedBackend(machine)));
  PINION_RETURN_IF_ERROR(session->Reserve(0, kMiB));
  const std::optional<LinkCalibration> link = session->GetLink(0);
  if (!link.has_value()) return absl::InternalError("the link was not measured");
  return *link;
}

}  // namespace pinion
