// Describes an operator for the fallback, read from its schema once.
//
// Thread safety: thread-safe; descriptions are never destroyed.

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

// The wider dtype used where CUDA has a kernel for a dtype and the CPU does not; results are
// rounded once. Double represents integers exactly only up to 2^53.
struct WiderType {
  bool (*is_narrow)(at::ScalarType) = nullptr;  // null: the CPU has all dtypes
  at::ScalarType wide = at::kFloat;
};

struct Operator {
  std::string name;     // "aten::add", without the overload
  std::string refusal;  // why emu does not run it; empty if it does
  std::vector<HostKernel::Access> arguments;
  std::optional<size_t> generator;  // index of the generator argument
  size_t results;
  // The host needs the result (a number or a shape), so it waits for the device.
  bool observed_by_host;
  // Accepts CPU tensors with device tensors, as on CUDA: indices, lengths.
  bool takes_host_tensors;
  CostRule cost;
  WiderType wider;
};

const Operator& OperatorOf(const c10::OperatorHandle& handle);

}  // namespace pinion::emu

#endif  // PINION_HOOKS_EMULATED_EMU_OPERATOR_H_
