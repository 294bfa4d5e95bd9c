// A saved tensor that stays where it is: what autograd does without hooks, done by hooks.
//
//   std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace&) override {
//     return KeepTensor(tensor);
//   }
//
// Backward gets the tensor that was saved, without its history, and autograd's own error if it was
// changed in place since. Where others need its memory, backward gets a loan (lent_tensors.h).
//
// Thread safety: as SavedTensor's.

#ifndef PINION_HOOKS_AUTOGRAD_KEPT_TENSOR_H_
#define PINION_HOOKS_AUTOGRAD_KEPT_TENSOR_H_

#include <ATen/core/Tensor.h>

#include <memory>

#include "pinion/hooks/autograd/saved_tensor_hooks.h"

namespace pinion {

std::unique_ptr<SavedTensor> KeepTensor(const at::Tensor& tensor);

}  // namespace pinion

#endif  // PINION_HOOKS_AUTOGRAD_KEPT_TENSOR_H_
