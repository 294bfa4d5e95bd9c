// One number for the bits of some tensors.

#ifndef PINION_EXAMPLES_TENSOR_FINGERPRINT_H_
#define PINION_EXAMPLES_TENSOR_FINGERPRINT_H_

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>

namespace pinion {

// The same on every machine and in every process. Copies tensors of a device to the host.
uint64_t TensorFingerprint(at::TensorList tensors);

}  // namespace pinion

#endif  // PINION_EXAMPLES_TENSOR_FINGERPRINT_H_
