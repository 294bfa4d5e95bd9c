// Hashes the bits of tensors.

#ifndef PINION_EXAMPLES_TENSOR_FINGERPRINT_H_
#define PINION_EXAMPLES_TENSOR_FINGERPRINT_H_

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>

namespace pinion {

// The hash does not depend on machine or process. Copies device tensors to the host.
uint64_t TensorFingerprint(at::TensorList tensors);

}  // namespace pinion

#endif  // PINION_EXAMPLES_TENSOR_FINGERPRINT_H_
