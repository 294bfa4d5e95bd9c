// The options of one training run.

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
  kBlocking,  // every copy blocks, as in PyTorch's save_on_cpu
  kPinion,
  kPlanned,  // the same with a memory target
};

const char* OffloadModeName(OffloadMode mode);  // "none", "blocking", "pinion", "planned"
// NotFound lists the modes.
absl::StatusOr<OffloadMode> FindOffloadMode(const std::string& name);

struct RunOptions {
  GptConfig model;  // its vocabulary is the text's
  int64_t steps = 0;
  uint64_t seed = 1;
  OffloadMode offload = OffloadMode::kPinion;
  // Target of planned offload; nullopt: the least memory that costs no time.
  std::optional<uint64_t> memory_target_bytes;
  // Weights, gradients and the optimizer are on the host.
  bool offload_weights = false;

  std::string device = "emu:0";  // or "cuda:0"
  // Preset of the emulated device.
  DevicePreset preset;
  uint64_t device_memory_bytes = UINT64_MAX;

  std::string resume_path;      // a checkpoint to resume from; "": none
  std::string checkpoint_path;  // written at the end; "": none
  std::string trace_path;       // of a Chrome trace, written at the end; "": none

  // Adds the data of comparisons to the result: gradient fingerprints and, without offload on the
  // emulated device, a step's trace. Uses operators that repeat their bits.
  bool for_comparison = false;
};

}  // namespace pinion

#endif  // PINION_PROGRAMS_RUN_OPTIONS_H_
