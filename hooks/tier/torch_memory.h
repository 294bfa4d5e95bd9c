// c10 storages as the host tier knows device memory.

#ifndef PINION_HOOKS_TIER_TORCH_MEMORY_H_
#define PINION_HOOKS_TIER_TORCH_MEMORY_H_

#include <c10/core/Storage.h>

#include "pinion/engine/tier/device_memory.h"

namespace pinion {

// Takes over the reference.
DeviceMemory TorchMemory(c10::Storage storage);

// One more reference to what TorchMemory made. Not empty.
c10::Storage StorageOf(const DeviceMemory& memory);

}  // namespace pinion

#endif  // PINION_HOOKS_TIER_TORCH_MEMORY_H_
