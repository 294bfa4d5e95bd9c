// One emulated machine after the other, in a program that runs the same work on several.
//
// Thread safety: as RegisterEmuDevice.

#ifndef PINION_PROGRAMS_NEXT_MACHINE_H_
#define PINION_PROGRAMS_NEXT_MACHINE_H_

#include <memory>

#include "absl/status/status.h"
#include "pinion/device/emulated/emulated_machine.h"

namespace pinion {

// RegisterEmuDevice, which refuses while tensors of the machine before live. Autograd's workers let
// go of the last ones a moment after their last backward, so they are waited for: 5 s at most.
absl::Status RegisterNextMachine(const std::shared_ptr<EmulatedMachine>& machine);

}  // namespace pinion

#endif  // PINION_PROGRAMS_NEXT_MACHINE_H_
