#include "pinion/hooks/tier/torch_tier.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/device/device.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/tier/torch_pinned_source.h"

namespace pinion {

absl::StatusOr<std::shared_ptr<HostTier>> TorchHostTier(const HostTierOptions& options,
                                                        const DeviceBackend& backend,
                                                        c10::DeviceType type,
                                                        std::shared_ptr<PinnedAllocator> pool) {
  PINION_ASSIGN_OR_RETURN(std::shared_ptr<TorchPinnedSource> source,
                          TorchPinnedSource::Create(backend, type));
  // Behind the backend's error: a driver that is missing is named first.
  PINION_RETURN_IF_ERROR(CheckTorchHas(type));
  PINION_RETURN_IF_ERROR(CheckIsRegistered(backend, type));
  return HostTier::OfProcess(options, backend, std::move(source), std::move(pool));
}

absl::Status CheckHasOwnMemory(const DeviceTier& tier) {
  const Device& device = tier.engine().device();
  if (device.info().link != LinkKind::kNone) return absl::OkStatus();
  return absl::UnimplementedError(absl::StrCat(
      "the memory of ", device.name(),
      " is the host's: what leaves it would take the same room there. Use no offload here"));
}

}  // namespace pinion
