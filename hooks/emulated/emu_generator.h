// Random numbers on "emu": each device has the CPU's generator algorithm with a state of its own.
//
// A seed gives the same numbers on the device as on the CPU. Drawing on one does not advance the
// other.
//
// Thread safety: as for LibTorch's generators, hold mutex().

#ifndef PINION_HOOKS_EMULATED_EMU_GENERATOR_H_
#define PINION_HOOKS_EMULATED_EMU_GENERATOR_H_

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

namespace pinion::emu {

at::Generator NewGenerator(c10::DeviceIndex index);
// Returns the device's generator, which lives as long as the process and is shared by all machines.
const at::Generator& DefaultGenerator(c10::DeviceIndex index);

// Returns a CPU generator that shares the state of `generator`, which is one of emu's.
const at::Generator& HostGeneratorOf(const at::Generator& generator);

}  // namespace pinion::emu

#endif  // PINION_HOOKS_EMULATED_EMU_GENERATOR_H_
