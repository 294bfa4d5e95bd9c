// The shape of a GPT, and quantities computed from it. Does not use LibTorch.

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
  int64_t sequence = 0;  // tokens
  int64_t batch = 0;     // sequences in a training step
  int64_t vocabulary = 0;
  double dropout = 0;
  bool bfloat16 = false;  // false: float32
  // Backward recomputes each block. Within a memory target the plan selects blocks and parts of
  // blocks.
  bool checkpoint_blocks = false;

  int64_t tokens() const { return batch * sequence; }
  uint64_t element_bytes() const { return bfloat16 ? 2 : 4; }

  absl::Status Validate() const;
};

// Finds "tiny", "small", "medium", "large" or "wide", which keeps a GPU busy enough to hide
// transfers. The vocabulary is unset. NotFound lists the sizes.
absl::StatusOr<GptConfig> FindGptSize(const std::string& name);
std::vector<std::string> GptSizeNames();

int64_t ParameterCount(const GptConfig& config);

// Returns bytes of parameters, gradients and AdamW's two moments.
uint64_t PersistentBytes(const GptConfig& config);

// Returns bytes that autograd saves in a step without checkpoints, and the number of saved tensors
// of at least 1 KiB.
uint64_t SavedBytes(const GptConfig& config);
int64_t SavedTensors(const GptConfig& config);

// Returns the FLOPs of forward and backward of a step.
double StepFlops(const GptConfig& config);

// A large model whose ratio of compute to transfer a scaled preset reproduces.
struct ScaledDevice {
  std::string stands_for;  // "a GPT of width 4096 ... on gh200_c2c"
  DevicePreset preset;
};
absl::StatusOr<ScaledDevice> ScaledDeviceFor(const GptConfig& config);

}  // namespace pinion

#endif  // PINION_PROGRAMS_GPT_CONFIG_H_
