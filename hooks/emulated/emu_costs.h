// Computes the cost of an operator: its floating-point operations and its memory traffic.
//
// Matrix products, convolutions, attention and recurrent layers are counted; everything else is
// bound by memory. docs/maintainers/emulator.md has the formulas.
//
// Thread safety: pure functions.

#ifndef PINION_HOOKS_EMULATED_EMU_COSTS_H_
#define PINION_HOOKS_EMULATED_EMU_COSTS_H_

#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include <string>

namespace pinion::emu {

enum class CostRule {
  kMemory,     // reads its arguments, writes its results
  kGather,     // touches its first tensor only where its indices say
  kMatmul,     // self, other
  kAddMatmul,  // bias, self, other
  kConvolution,
  kConvolutionBackward,
  kAttention,
  kAttentionBackward,
  kRecurrent,
};

// Returns the rule for an operator's name without overload, such as "aten::mm".
CostRule CostRuleOf(const std::string& name);

// Returns the flops; `arguments` are the operator's, before it runs.
double FlopsOf(CostRule rule, c10::ArrayRef<c10::IValue> arguments);

// Returns the bytes moved by a kGather operator whose tensors have `whole_bytes` in all.
double GatherBytes(c10::ArrayRef<c10::IValue> arguments, bool in_place, double whole_bytes);

}  // namespace pinion::emu

#endif  // PINION_HOOKS_EMULATED_EMU_COSTS_H_
