#include "pinion/programs/next_machine.h"

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "pinion/hooks/emulated/emu_device.h"

namespace pinion {
namespace {

constexpr int kAttempts = 500;
constexpr absl::Duration kPause = absl::Milliseconds(10);

}  // namespace

absl::Status RegisterNextMachine(const std::shared_ptr<EmulatedMachine>& machine) {
  absl::Status registered = RegisterEmuDevice(machine);
  for (int i = 0; i < kAttempts && absl::IsFailedPrecondition(registered); ++i) {
    absl::SleepFor(kPause);
    registered = RegisterEmuDevice(machine);
  }
  return registered;
}

}  // namespace pinion
