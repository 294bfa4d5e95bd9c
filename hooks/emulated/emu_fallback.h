// Runs the device's operators by the CPU's kernels over device memory: LibTorch's boxed fallback.
//
// Throws c10::Error with the operator's name if the CPU lacks the operator, if it returns a view
// (views must be native: emu_memory_ops.h), or if it mixes devices.
//
// Thread safety: thread-safe.

#ifndef PINION_HOOKS_EMULATED_EMU_FALLBACK_H_
#define PINION_HOOKS_EMULATED_EMU_FALLBACK_H_

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace pinion::emu {

void RunOnHost(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Runs an operator that LibTorch composes of others (an allocation and the out= variant), and
// labels the allocations with its name.
void RunLabelled(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace pinion::emu

#endif  // PINION_HOOKS_EMULATED_EMU_FALLBACK_H_
