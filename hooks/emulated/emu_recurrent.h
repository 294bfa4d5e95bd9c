// Runs each recurrent layer as one operator, differentiated by the CPU's own autograd.
//
// LibTorch computes LSTM and GRU differently on every device, so a step-by-step implementation
// could not match the CPU's bits. Like cuDNN, the layer is one kernel. Unlike cuDNN, it saves only
// its inputs and recomputes forward in backward. There is no double backward.

#ifndef PINION_HOOKS_EMULATED_EMU_RECURRENT_H_
#define PINION_HOOKS_EMULATED_EMU_RECURRENT_H_

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace pinion::emu {

// A boxed kernel of AutogradPrivateUse1. Thread safety: thread-safe.
void RunRecurrent(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace pinion::emu

#endif  // PINION_HOOKS_EMULATED_EMU_RECURRENT_H_
