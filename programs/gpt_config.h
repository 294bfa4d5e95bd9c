// The shape of a GPT, and what follows from it by arithmetic. Knows no LibTorch.

#ifndef PINION_PROGRAMS_GPT_CONFIG_H_
#define PINION_PROGRAMS_GPT_CONFIG_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/device/emulated/cost_model.h"

namespace pinion {

struct GptConfig {
  int64_t layers = 0;
  int64_t width = 0;
  int64_t heads = 0;
  int64_t sequence = 0;  // tokens that a position can see, itself included
  int64_t batch = 0;     // sequences in a training step
  int64_t vocabulary = 0;
  double dropout = 0;
  bool bfloat16 = false;  // false: float32
  // Backward computes each block again; within a memory target, those blocks and parts of blocks
  // that the plan chooses.
  bool checkpoint_blocks = false;

  int64_t tokens() const { return batch * sequence; }
  uint64_t element_bytes() const { return bfloat16 ? 2 : 4; }

  absl::Status Validate() const;
};

// "tiny", "small", "medium", "large", and "wide", which keeps a real accelerator busy enough to
// hide transfers; without a vocabulary. NotFound names them all.
absl::StatusOr<GptConfig> FindGptSize(const std::string& name);
std::vector<std::string> GptSizeNames();

int64_t ParameterCount(const GptConfig& config);

// Bytes of parameters, gradients and the two moments of AdamW.
uint64_t PersistentBytes(const GptConfig& config);

// Bytes that autograd saves in one step without checkpoints, and in how many tensors (of 1 KiB and
// more).
uint64_t SavedBytes(const GptConfig& config);
int64_t SavedTensors(const GptConfig& config);

// FLOPs of forward and backward of one step.
double StepFlops(const GptConfig& config);

// A large model whose balance of compute and transfer a scaled preset reproduces.
struct ScaledDevice {
  std::string stands_for;  // "a GPT of width 4096 ... on gh200_c2c"
  DevicePreset preset;
};
absl::StatusOr<ScaledDevice> ScaledDeviceFor(const GptConfig& config);

}  // namespace pinion

#endif  // PINION_PROGRAMS_GPT_CONFIG_H_
