// A saved tensor without memory, which the program recomputes when it is read (a checkpoint's).
// Step recordings leave it out, and count work during its Unpack as work of the step.

#ifndef PINION_HOOKS_AUTOGRAD_PLACEHOLDER_TENSOR_H_
#define PINION_HOOKS_AUTOGRAD_PLACEHOLDER_TENSOR_H_

#include "pinion/hooks/autograd/saved_tensor_hooks.h"

namespace pinion {

class PlaceholderTensor : public SavedTensor {
 public:
  const void* MemoryOwner() const final { return nullptr; }
};

}  // namespace pinion

#endif  // PINION_HOOKS_AUTOGRAD_PLACEHOLDER_TENSOR_H_
