// Converts c10 storages to the host tier's DeviceMemory and back.

#ifndef PINION_HOOKS_TIER_TORCH_MEMORY_H_
#define PINION_HOOKS_TIER_TORCH_MEMORY_H_

#include <c10/core/Storage.h>

#include "pinion/engine/tier/guarded_memory.h"

namespace pinion {

// Returns the storage as device memory. Takes over the reference.
DeviceMemory TorchMemory(c10::Storage storage);

// Returns another reference to the storage of a TorchMemory(). `memory` must not be empty.
c10::Storage StorageOf(const DeviceMemory& memory);

}  // namespace pinion

#endif  // PINION_HOOKS_TIER_TORCH_MEMORY_H_
