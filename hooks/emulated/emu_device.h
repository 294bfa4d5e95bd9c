// The emulated accelerator as a LibTorch device: `torch::Device("emu:0")`.
//
//   auto machine = pinion::EmulatedMachine::Create(options).value();
//   pinion::RegisterEmuDevice(machine);                     // a later call replaces it
//   auto model = Gpt(config); model->to(torch::Device("emu:0"));
//
// Operators run on the CPU over the device's memory, without copies, and cost virtual time. Results
// are bitwise equal to the CPU's, with the exceptions of docs/maintainers/emulator.md. An operator
// that would break aliasing, or that is missing, is refused by name.
//
// Registering makes emu *the* accelerator of the process (LibTorch has one): pin_memory() and
// at::accelerator go to it. So it happens only when a program asks for it.
//
// Thread safety: RegisterEmuDevice is not thread-safe against tensors of the device in use.
// Ownership: the registration keeps the machine alive until another takes its place.

#ifndef PINION_HOOKS_EMULATED_EMU_DEVICE_H_
#define PINION_HOOKS_EMULATED_EMU_DEVICE_H_

#include <memory>

#include "absl/status/status.h"
#include "pinion/device/device_backend.h"
#include "pinion/device/emulated/emulated_machine.h"

namespace pinion {

// Registers `machine` as the device type "emu". Later calls replace the machine (tests do, with
// other seeds): FailedPrecondition, naming the bytes, while tensors of the old one are alive. A
// machine with a broken device can always be replaced: its tensors stay with it and must not be
// used any more.
absl::Status RegisterEmuDevice(std::shared_ptr<EmulatedMachine> machine);

// The machine that was registered last; null before.
std::shared_ptr<EmulatedMachine> RegisteredEmuMachine();

}  // namespace pinion

#endif  // PINION_HOOKS_EMULATED_EMU_DEVICE_H_
