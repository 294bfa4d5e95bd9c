#include "pinion/hooks/tier/torch_tier.h"

#include <utility>

#include "pinion/allocator/base/status_macros.h"
#include "pinion/hooks/tier/torch_pinned_source.h"

namespace pinion {

absl::StatusOr<std::shared_ptr<HostTier>> TorchHostTier(const HostTierOptions& options,
                                                        const DeviceBackend& backend,
                                                        c10::DeviceType type,
                                                        std::shared_ptr<PinnedAllocator> pool) {
  PINION_ASSIGN_OR_RETURN(std::shared_ptr<TorchPinnedSource> source,
                          TorchPinnedSource::Create(backend, type));
  return HostTier::OfProcess(options, backend, std::move(source), std::move(pool));
}

}  // namespace pinion
