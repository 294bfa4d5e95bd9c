// A saved tensor that holds no memory and that the program itself makes again when it is read: a
// checkpoint's. There is nothing to keep, move or drop, so a recording of a step leaves it out, and
// what the program does while it is read is the step's own work.

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
