// A checksum of bytes in device memory, computed on the device that has them.
//
//   const TensorChecksum saved = TensorChecksum::Of(storage, extent);
//   ... the bytes leave the device and come back ...
//   if (TensorChecksum::Of(fetched, place) != saved) ...
//
// Every 8 bytes are mixed with their position, and the results added up modulo 2^64. A change of
// one byte is always found; swapped, shifted, missing or repeated ones are missed once in 2^64
// times. Against accidents, not against attackers.
//
// Takes some twelve integer operators per 4 MiB, and up to 12 MiB of device memory while they run.
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
  TensorChecksum() = default;  // of nothing

  // Of the bytes [extent) of `storage`, after the current stream's present work. Does not wait for
  // it.
  static TensorChecksum Of(const c10::Storage& storage, const StorageExtent& extent);

  // Device memory that checksums of so many extents take, at most, with what computing that of the
  // largest one takes meanwhile.
  static uint64_t MostBytes(size_t extents, uint64_t largest_bytes);

  explicit operator bool() const { return sum_.defined(); }

  // Blocks the host until it is there. Must not be of nothing.
  uint64_t value() const;

 private:
  at::Tensor sum_;  // of 8 bytes, on the device
  std::optional<c10::Stream> stream_;
};

}  // namespace pinion

#endif  // PINION_HOOKS_AUTOGRAD_TENSOR_CHECKSUM_H_
