// Checks that the loaded LibTorch is the one that Pinion was compiled with. With another release,
// classes would have another layout.
//
//   PINION_RETURN_IF_ERROR(CheckTorchVersion(aoti_torch_abi_version()));
//
// Thread safety: thread-safe.

#ifndef PINION_HOOKS_AUTOGRAD_TORCH_VERSION_H_
#define PINION_HOOKS_AUTOGRAD_TORCH_VERSION_H_

#include <cstdint>

#include "absl/status/status.h"

namespace pinion {

// `loaded` is encoded as TORCH_ABI_VERSION. FailedPrecondition, naming both releases, if they
// differ.
absl::Status CheckTorchVersion(uint64_t loaded);

}  // namespace pinion

#endif  // PINION_HOOKS_AUTOGRAD_TORCH_VERSION_H_
