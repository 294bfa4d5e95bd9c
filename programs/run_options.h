// What one training run is asked to do.

#ifndef PINION_PROGRAMS_RUN_OPTIONS_H_
#define PINION_PROGRAMS_RUN_OPTIONS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/programs/gpt_config.h"

namespace pinion {

enum class OffloadMode {
  kNone,
  kBlocking,  // every copy blocks, as PyTorch's save_on_cpu
  kPinion,
  kPlanned,  // the same, told a memory target
};

const char* OffloadModeName(OffloadMode mode);  // "none", "blocking", "pinion", "planned"
// NotFound names them all.
absl::StatusOr<OffloadMode> FindOffloadMode(const std::string& name);

struct RunOptions {
  GptConfig model;  // its vocabulary is the text's
  int64_t steps = 0;
  uint64_t seed = 1;
  OffloadMode offload = OffloadMode::kPinion;
  // Of planned offload; none: the least memory that costs no time.
  std::optional<uint64_t> memory_target_bytes;
  // The master copy of all weights, their gradients and the optimizer are on the host.
  bool offload_weights = false;

  std::string device = "emu:0";  // or "cuda:0"
  // Of the emulated accelerator.
  DevicePreset preset;
  uint64_t device_memory_bytes = UINT64_MAX;

  std::string resume_path;      // a checkpoint to go on from; "": from the beginning
  std::string checkpoint_path;  // written at the end; "": none
  std::string trace_path;       // of a Chrome trace, written at the end; "": none

  // Adds what comparisons need to the result: fingerprints of all gradients and, without offload
  // on the emulated accelerator, the trace of a step. Asks LibTorch for operators that give the
  // same bits on every run.
  bool for_comparison = false;
};

}  // namespace pinion

#endif  // PINION_PROGRAMS_RUN_OPTIONS_H_
