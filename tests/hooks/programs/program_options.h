// The options by which a Program is offloaded.

#ifndef PINION_TESTS_HOOKS_PROGRAMS_PROGRAM_OPTIONS_H_
#define PINION_TESTS_HOOKS_PROGRAMS_PROGRAM_OPTIONS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/activations/module_heads.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/weights/weight_offloader.h"
#include "pinion/tests/hooks/programs/program.h"

namespace pinion::testing {

inline constexpr uint64_t kLeastTarget = 1;  // everything that can be offloaded is

// How a program runs.
struct Mode {
  bool offload = false;
  // Where the program's target is a number.
  std::optional<uint64_t> target_bytes = std::nullopt;
  std::optional<uint64_t> limit_bytes = std::nullopt;  // of the device
  bool limits_from_first_save = false;  // in each micro-batch, the limit begins with a saved tensor
};

// False where weights are streamed or the backing is slow: both fail without host memory.
bool HasHostLimits(const Program& program);

OffloadOptions OptionsOf(const Program& program, const Mode& mode,
                         const std::shared_ptr<EmulatedMachine>& machine);

// The second session's: as `options`, which are the first one's, with other windows.
OffloadOptions OtherOptionsOf(const Program& program, OffloadOptions options);

// Whose tier is that of the sessions.
WeightOptions WeightOptionsOf(const Program& program, const Mode& mode,
                              const OffloadOptions& offload);

ModuleHeads HeadsOf(const Program& program, const std::vector<at::Tensor>& parameters);

}  // namespace pinion::testing

#endif  // PINION_TESTS_HOOKS_PROGRAMS_PROGRAM_OPTIONS_H_
