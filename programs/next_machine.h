// Registers one emulated machine after another, for programs that repeat work on several.
//
// Thread safety: as RegisterEmuDevice.

#ifndef PINION_PROGRAMS_NEXT_MACHINE_H_
#define PINION_PROGRAMS_NEXT_MACHINE_H_

#include <memory>

#include "absl/status/status.h"
#include "pinion/device/emulated/emulated_machine.h"

namespace pinion {

// Calls RegisterEmuDevice, which fails while tensors of the previous machine live. Autograd's
// workers free the last ones shortly after backward, so this waits up to 5 s.
absl::Status RegisterNextMachine(const std::shared_ptr<EmulatedMachine>& machine);

}  // namespace pinion

#endif  // PINION_PROGRAMS_NEXT_MACHINE_H_
