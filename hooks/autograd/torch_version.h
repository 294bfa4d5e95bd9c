// Whether the LibTorch that is loaded is the one whose headers Pinion was compiled with. A shared
// library that a program loads beside another release would find its classes laid out differently.
//
//   PINION_RETURN_IF_ERROR(CheckTorchVersion(aoti_torch_abi_version()));
//
// Thread safety: thread-safe.

#ifndef PINION_HOOKS_AUTOGRAD_TORCH_VERSION_H_
#define PINION_HOOKS_AUTOGRAD_TORCH_VERSION_H_

#include <cstdint>

#include "absl/status/status.h"

namespace pinion {

// `loaded` as TORCH_ABI_VERSION counts. FailedPrecondition names both releases if it is another.
absl::Status CheckTorchVersion(uint64_t loaded);

}  // namespace pinion

#endif  // PINION_HOOKS_AUTOGRAD_TORCH_VERSION_H_
