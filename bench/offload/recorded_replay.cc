#include "pinion/bench/offload/recorded_replay.h"

#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/bench/offload/replayed_step.h"
#include "pinion/device/emulated/emulated_backend.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/device/emulated/faults.h"
#include "pinion/engine/schedule/planned_schedule.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/programs/next_machine.h"

namespace pinion {
namespace {

struct Ran {
  double us = 0;
  uint64_t events = 0;  // recorded
};

// Runs one step, and returns its effect on the device.
absl::StatusOr<Ran> RunOnce(ReplayedStep& step, const ReplayedStep::MakeScope& make_scope,
                            EmulatedMachine& machine) {
  const double begin_ms = machine.now_ms();
  const uint64_t events_before = machine.calls(DeviceCall::kRecordEvent);
  step.Run(make_scope);
  PINION_RETURN_IF_ERROR(machine.SynchronizeDevice(0));
  return Ran{.us = (machine.now_ms() - begin_ms) * 1e3,
             .events = machine.calls(DeviceCall::kRecordEvent) - events_before};
}

}  // namespace

absl::StatusOr<RecordedReplay> ReplayRecorded(const StepTrace& step, uint64_t target_bytes,
                                              const MethodWorld& world) {
  EmulatedOptions emulated;
  emulated.preset = world.preset;
  emulated.memory_bytes = world.memory_bytes;
  emulated.detect_races = false;
  PINION_ASSIGN_OR_RETURN(const std::shared_ptr<EmulatedMachine> machine,
                          EmulatedMachine::Create(emulated));
  PINION_RETURN_IF_ERROR(RegisterNextMachine(machine));
  PINION_ASSIGN_OR_RETURN(const std::unique_ptr<ReplayedStep> replayed,
                          ReplayedStep::Create(step, machine, /*layers=*/0));
  OffloadOptions options;
  options.link = world.link;
  options.memory_target_bytes = target_bytes;
  PINION_ASSIGN_OR_RETURN(const std::shared_ptr<OffloadSession> session,
                          OffloadSession::Create(options, EmulatedBackend(machine)));
  const auto scope = [&session] { return std::make_shared<OffloadScope>(session); };
  const auto none = []() -> std::shared_ptr<void> { return nullptr; };
  PINION_ASSIGN_OR_RETURN(const Ran alone, RunOnce(*replayed, none, *machine));
  Ran recorded, planned;
  // The first one is not known; then as many as it takes for the session to be sure. Behind these
  // comes one that reads the last record.
  for (int i = 0; i < 1 + PlannedSchedule::kKnownInARow; ++i) {
    PINION_ASSIGN_OR_RETURN(recorded, RunOnce(*replayed, scope, *machine));
  }
  for (int i = 0; i < 2; ++i) {
    PINION_ASSIGN_OR_RETURN(planned, RunOnce(*replayed, scope, *machine));
  }
  if (recorded.events < planned.events + 2 * step.accesses.size()) {
    return absl::InternalError(absl::StrCat("a step was to be recorded, and then another one not: ",
                                            recorded.events, " events, then ", planned.events));
  }
  return RecordedReplay{.recorded_us = recorded.us, .planned_us = planned.us, .alone_us = alone.us};
}

}  // namespace pinion
