// Copies many pieces of device memory into one block, with a few kernels.

#ifndef PINION_HOOKS_AUTOGRAD_GATHER_H_
#define PINION_HOOKS_AUTOGRAD_GATHER_H_

#include <c10/core/Storage.h>

#include <cstdint>
#include <vector>

#include "pinion/hooks/autograd/torch_bridge.h"

namespace pinion {

struct GatherPiece {
  const void* data = nullptr;  // on the stream's device; the caller keeps it alive
  uint64_t size_bytes = 0;
  uint64_t offset_bytes = 0;  // in the block
};

// A new block on `stream` with each piece in its place, filled after the present work of `stream`.
// Bytes between the pieces are undefined. Throws what LibTorch throws, c10::OutOfMemoryError among
// it. Not for a stream that captures a graph.
c10::Storage GatherOnDevice(const BoundStream& stream, const std::vector<GatherPiece>& pieces,
                            uint64_t block_bytes);

}  // namespace pinion

#endif  // PINION_HOOKS_AUTOGRAD_GATHER_H_
