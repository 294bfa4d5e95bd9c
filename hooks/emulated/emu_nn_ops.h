// Operators of neural networks that LibTorch routes differently for out-of-tree devices: dropout,
// the choice of an attention kernel, recurrent layers. Each is bitwise equal to the CPU's.

#ifndef PINION_HOOKS_EMULATED_EMU_NN_OPS_H_
#define PINION_HOOKS_EMULATED_EMU_NN_OPS_H_

#include <torch/library.h>

namespace pinion::emu {

// Registers them; `library` implements "aten" for PrivateUse1, `autograd` for AutogradPrivateUse1.
void RegisterNnOps(torch::Library& library, torch::Library& autograd);

}  // namespace pinion::emu

#endif  // PINION_HOOKS_EMULATED_EMU_NN_OPS_H_
