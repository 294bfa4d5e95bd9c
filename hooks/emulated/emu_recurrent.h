// Recurrent layers as one operator each, differentiated by the CPU's own autograd.
//
// LibTorch takes another path for LSTM and GRU on every device, so step by step they could not
// equal the CPU's bits. As with cuDNN the layer is one kernel; unlike cuDNN it saves its inputs
// alone and computes forward again in backward. No double backward.

#ifndef PINION_HOOKS_EMULATED_EMU_RECURRENT_H_
#define PINION_HOOKS_EMULATED_EMU_RECURRENT_H_

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace pinion::emu {

// A boxed kernel of AutogradPrivateUse1. Thread safety: thread-safe.
void RunRecurrent(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace pinion::emu

#endif  // PINION_HOOKS_EMULATED_EMU_RECURRENT_H_
