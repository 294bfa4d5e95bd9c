// Returns the process's host tier for the devices of a LibTorch device type.

#ifndef PINION_HOOKS_TIER_TORCH_TIER_H_
#define PINION_HOOKS_TIER_TORCH_TIER_H_

#include <c10/core/DeviceType.h>

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/device/device_backend.h"
#include "pinion/engine/tier/device_tier.h"
#include "pinion/engine/tier/host_tier.h"

namespace pinion {

// Returns HostTier::OfProcess with a TorchPinnedSource, or with the program's own `pool` if given.
// FailedPrecondition if LibTorch's library for the type is not loaded. InvalidArgument for a
// backend of an emulated machine that is not the registered one.
absl::StatusOr<std::shared_ptr<HostTier>> TorchHostTier(
    const HostTierOptions& options, const DeviceBackend& backend, c10::DeviceType type,
    std::shared_ptr<PinnedAllocator> pool = nullptr);

// Returns Unimplemented if the device's memory is host memory, where offloading frees nothing.
absl::Status CheckHasOwnMemory(const DeviceTier& tier);

}  // namespace pinion

#endif  // PINION_HOOKS_TIER_TORCH_TIER_H_
