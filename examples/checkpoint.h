// A training run on disk: a dictionary of tensors that Python's torch.load reads too.

#ifndef PINION_EXAMPLES_CHECKPOINT_H_
#define PINION_EXAMPLES_CHECKPOINT_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace pinion {

struct Checkpoint {
  int64_t steps = 0;  // trained so far
  std::string run;    // the options that must be the same when the run goes on
  std::map<std::string, at::Tensor> tensors;  // on the CPU
};

// Replaces `path` at once or not at all.
absl::Status WriteCheckpoint(const std::string& path, const Checkpoint& checkpoint);

// NotFound, or DataLoss when the file is not a whole checkpoint.
absl::StatusOr<Checkpoint> ReadCheckpoint(const std::string& path);

}  // namespace pinion

#endif  // PINION_EXAMPLES_CHECKPOINT_H_
