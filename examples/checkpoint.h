// A training run on disk: a dictionary of tensors that Python's torch.load can read.

#ifndef PINION_EXAMPLES_CHECKPOINT_H_
#define PINION_EXAMPLES_CHECKPOINT_H_

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace pinion {

struct Checkpoint {
  int64_t steps = 0;                          // trained
  std::string run;                            // options that a resumed run must share
  std::map<std::string, at::Tensor> tensors;  // on the CPU
};

// Replaces `path` atomically.
absl::Status WriteCheckpoint(const std::string& path, const Checkpoint& checkpoint);

// NotFound, or DataLoss if the file is not a complete checkpoint.
absl::StatusOr<Checkpoint> ReadCheckpoint(const std::string& path);

// Hashes the bits of tensors. The hash does not depend on machine or process. Copies device tensors
// to the host.
uint64_t TensorFingerprint(at::TensorList tensors);

}  // namespace pinion

#endif  // PINION_EXAMPLES_CHECKPOINT_H_
