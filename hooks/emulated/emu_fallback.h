// The boxed fallback: any operator of the device, run with the CPU's kernel over device memory.
//
// Refused with c10::Error that names the operator: one that the CPU does not have, one that returns
// a view (a view must be native: emu_memory_ops.h), one that mixes devices.
//
// Thread safety: thread-safe.

#ifndef PINION_HOOKS_EMULATED_EMU_FALLBACK_H_
#define PINION_HOOKS_EMULATED_EMU_FALLBACK_H_

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace pinion::emu {

void RunOnHost(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// For an operator that LibTorch builds from others (allocate, then the out= variant): names the
// allocations after it.
void RunLabelled(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace pinion::emu

#endif  // PINION_HOOKS_EMULATED_EMU_FALLBACK_H_
