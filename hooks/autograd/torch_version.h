// Checks that the loaded LibTorch is the one that Pinion was compiled with, and has a device type.
// Classes of another release would have another layout.
//
//   PINION_RETURN_IF_ERROR(CheckTorchVersion(aoti_torch_abi_version()));
//   PINION_RETURN_IF_ERROR(CheckTorchHas(c10::DeviceType::CUDA));
//
// Thread safety: thread-safe.

#ifndef PINION_HOOKS_AUTOGRAD_TORCH_VERSION_H_
#define PINION_HOOKS_AUTOGRAD_TORCH_VERSION_H_

#include <c10/core/DeviceType.h>

#include <cstdint>

#include "absl/status/status.h"

namespace pinion {

// `loaded` is encoded as TORCH_ABI_VERSION. FailedPrecondition, naming both releases, if they
// differ.
absl::Status CheckTorchVersion(uint64_t loaded);

// Returns FailedPrecondition if the library with LibTorch's guard and allocator of this device type
// is not loaded. Most of LibTorch's functions for the type throw then.
absl::Status CheckTorchHas(c10::DeviceType type);

}  // namespace pinion

#endif  // PINION_HOOKS_AUTOGRAD_TORCH_VERSION_H_
