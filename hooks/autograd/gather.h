// Copies many buffers of device memory into one block on the same device, with a few kernels.

#ifndef PINION_HOOKS_AUTOGRAD_GATHER_H_
#define PINION_HOOKS_AUTOGRAD_GATHER_H_

#include <c10/core/Storage.h>

#include <cstdint>
#include <vector>

#include "pinion/hooks/autograd/torch_bridge.h"

namespace pinion {

struct GatherPiece {
  const void* data = nullptr;  // on the stream's device; the caller keeps the memory alive
  uint64_t size_bytes = 0;
  uint64_t offset_bytes = 0;  // in the block
};

// Returns a new block on `stream` that holds each piece at its offset, filled after the stream's
// present work. Bytes between the pieces are undefined. Throws LibTorch's errors, among them
// c10::OutOfMemoryError. Must not be called while `stream` captures a graph.
c10::Storage GatherOnDevice(const BoundStream& stream, const std::vector<GatherPiece>& pieces,
                            uint64_t block_bytes);

}  // namespace pinion

#endif  // PINION_HOOKS_AUTOGRAD_GATHER_H_
