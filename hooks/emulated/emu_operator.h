// What the fallback needs to know of an operator, read from its schema once.
//
// Thread safety: thread-safe; descriptions live for ever.

#ifndef PINION_HOOKS_EMULATED_EMU_OPERATOR_H_
#define PINION_HOOKS_EMULATED_EMU_OPERATOR_H_

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "pinion/hooks/emulated/emu_costs.h"
#include "pinion/hooks/emulated/emu_host_kernel.h"

namespace pinion::emu {

// A type that CUDA has a kernel for and the CPU has not, and the wider one that is computed in
// instead, with one rounding at the end. Double holds integers exactly up to 2^53 only.
struct WiderType {
  bool (*is_narrow)(at::ScalarType) = nullptr;  // null: the CPU has them all
  at::ScalarType wide = at::kFloat;
};

struct Operator {
  std::string name;     // "aten::add", without the overload
  std::string refusal;  // why emu does not run it; empty if it does
  std::vector<HostKernel::Access> arguments;
  std::optional<size_t> generator;  // the argument that is one
  size_t results;
  // The host needs what it computes, a number or a shape, so it waits for the device.
  bool observed_by_host;
  // Takes tensors of the CPU beside the device's, as CUDA does: indices, lengths.
  bool takes_host_tensors;
  CostRule cost;
  WiderType wider;
};

const Operator& OperatorOf(const c10::OperatorHandle& handle);

}  // namespace pinion::emu

#endif  // PINION_HOOKS_EMULATED_EMU_OPERATOR_H_
