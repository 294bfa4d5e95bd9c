// Computes a checksum of device memory on the device.
//
//   const TensorChecksum saved = TensorChecksum::Of(storage, extent);
//   ... the bytes leave the device and come back ...
//   if (TensorChecksum::Of(fetched, place) != saved) ...
//
// Each 8-byte word is mixed with its index, and the results are summed modulo 2^64. A change within
// one word is always found. Swapped, shifted, missing or repeated words go unnoticed with a
// probability of 2^-64. The checksum detects accidents, not attacks.
//
// Runs some twelve integer operators per 4 MiB, which need up to 12 MiB of device memory.
//
// Thread safety: a value.

#ifndef PINION_HOOKS_AUTOGRAD_TENSOR_CHECKSUM_H_
#define PINION_HOOKS_AUTOGRAD_TENSOR_CHECKSUM_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <optional>

#include "pinion/hooks/autograd/torch_bridge.h"

namespace pinion {

class TensorChecksum {
 public:
  TensorChecksum() = default;  // no bytes, no value

  // Computes the checksum of bytes [extent) of `storage` after the current stream's present work.
  // Does not block the host.
  static TensorChecksum Of(const c10::Storage& storage, const StorageExtent& extent);

  // Returns an upper bound of the device memory for checksums of `extents` extents, including the
  // temporary memory for the largest one.
  static uint64_t MostBytes(size_t extents, uint64_t largest_bytes);

  explicit operator bool() const { return sum_.defined(); }

  // Blocks the host until the checksum is computed. Throws c10::Error if there is none.
  uint64_t value() const;

 private:
  at::Tensor sum_;  // 8 bytes, on the device
  std::optional<c10::Stream> stream_;
};

}  // namespace pinion

#endif  // PINION_HOOKS_AUTOGRAD_TENSOR_CHECKSUM_H_
