// Keeps a saved tensor on the device, as autograd does without hooks.
//
//   std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace&) override {
//     return KeepTensor(tensor);
//   }
//
// Unpack returns the tensor without its history. It throws autograd's own error if the tensor was
// changed in place after it was saved. Memory that has other users is aliased (lent_tensors.h).
//
// Thread safety: that of SavedTensor.

#ifndef PINION_HOOKS_AUTOGRAD_KEPT_TENSOR_H_
#define PINION_HOOKS_AUTOGRAD_KEPT_TENSOR_H_

#include <ATen/core/Tensor.h>

#include <memory>

#include "pinion/hooks/autograd/saved_tensor_hooks.h"

namespace pinion {

std::unique_ptr<SavedTensor> KeepTensor(const at::Tensor& tensor);

}  // namespace pinion

#endif  // PINION_HOOKS_AUTOGRAD_KEPT_TENSOR_H_
