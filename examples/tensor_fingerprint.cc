#include "pinion/examples/tensor_fingerprint.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace pinion {

// FNV-1a over words of eight bytes.
uint64_t TensorFingerprint(at::TensorList tensors) {
  uint64_t hash = 14695981039346656037u;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor on_host = tensor.cpu().contiguous();
    const char* data = static_cast<const char*>(on_host.const_data_ptr());
    for (size_t left = on_host.nbytes(); left > 0;) {
      uint64_t word = 0;
      const size_t size = std::min(left, sizeof(word));
      std::memcpy(&word, data, size);
      hash = (hash ^ word) * 1099511628211u;
      data += size;
      left -= size;
    }
  }
  return hash;
}

}  // namespace pinion
