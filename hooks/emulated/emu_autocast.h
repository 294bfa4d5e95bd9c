// Automatic mixed precision on "emu": the policies that LibTorch has for CUDA.

#ifndef PINION_HOOKS_EMULATED_EMU_AUTOCAST_H_
#define PINION_HOOKS_EMULATED_EMU_AUTOCAST_H_

#include <torch/library.h>

namespace pinion::emu {

// `m` implements "aten" for AutocastPrivateUse1.
void RegisterAutocast(torch::Library& m);

}  // namespace pinion::emu

#endif  // PINION_HOOKS_EMULATED_EMU_AUTOCAST_H_
