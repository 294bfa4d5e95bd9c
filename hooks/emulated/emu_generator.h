// Random numbers on "emu": per device, the CPU's generator with a state of its own.
//
// So a seed gives the same numbers on the device as on the CPU, and drawing on one leaves the
// other alone.
//
// Thread safety: as LibTorch's generators: lock mutex().

#ifndef PINION_HOOKS_EMULATED_EMU_GENERATOR_H_
#define PINION_HOOKS_EMULATED_EMU_GENERATOR_H_

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

namespace pinion::emu {

at::Generator NewGenerator(c10::DeviceIndex index);
// One per device, for the life of the process; machines that come later go on with it.
const at::Generator& DefaultGenerator(c10::DeviceIndex index);

// The CPU's generator that has the state of `generator`, one of emu's.
const at::Generator& HostGeneratorOf(const at::Generator& generator);

}  // namespace pinion::emu

#endif  // PINION_HOOKS_EMULATED_EMU_GENERATOR_H_
