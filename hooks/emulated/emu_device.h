// Makes an emulated machine available to LibTorch as a device: `torch::Device("emu:0")`.
//
//   auto machine = pinion::EmulatedMachine::Create(options).value();
//   pinion::RegisterEmuDevice(machine);                     // a later call replaces it
//   auto model = Gpt(config); model->to(torch::Device("emu:0"));
//
// Operators run on the CPU, without copies, in the device's memory, and cost virtual time. Results
// are bitwise equal to the CPU's; docs/maintainers/emulator.md lists the exceptions. Operators that
// are missing or would break aliasing throw an error that names them.
//
// LibTorch has one accelerator per process. Registering emu makes it that one, so that pin_memory()
// and at::accelerator use it; a program must register it explicitly. Python runs backward with an
// engine of its own: a Python program registers a machine with all devices before its first
// backward.
//
// Thread safety: do not call RegisterEmuDevice while tensors of the device are in use.
// Ownership: the registration keeps the machine alive until it is replaced.

#ifndef PINION_HOOKS_EMULATED_EMU_DEVICE_H_
#define PINION_HOOKS_EMULATED_EMU_DEVICE_H_

#include <memory>

#include "absl/status/status.h"
#include "pinion/device/emulated/emulated_machine.h"

namespace pinion {

// Registers `machine` as the device type "emu", or replaces the machine. FailedPrecondition with
// the number of bytes while tensors of the old machine are alive. Exception: a machine with a
// broken device can always be replaced; its tensors must not be used after that.
absl::Status RegisterEmuDevice(std::shared_ptr<EmulatedMachine> machine);

// Returns the machine that was registered last, or null.
std::shared_ptr<EmulatedMachine> RegisteredEmuMachine();

}  // namespace pinion

#endif  // PINION_HOOKS_EMULATED_EMU_DEVICE_H_
