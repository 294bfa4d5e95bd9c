#include "pinion/hooks/tier/torch_tier.h"

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/device/device.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/tier/torch_pinned_source.h"

namespace pinion {
namespace {

// Returns InvalidArgument if LibTorch's devices are of another emulated machine than the backend's,
// where tensors would stay, because the backend does not know their memory and streams.
absl::Status CheckIsRegistered(const DeviceBackend& backend, c10::DeviceType type) {
  if (backend.type_name != "emu") return absl::OkStatus();
  PINION_ASSIGN_OR_RETURN(const std::shared_ptr<Device> device, backend.Open(0));
  const c10::Stream stream(c10::Stream::DEFAULT, c10::Device(type, 0));
  const absl::Status known = device->IsCapturing(NativeStream(stream)).status();
  if (!absl::IsInvalidArgument(known)) return absl::OkStatus();  // other errors show in later calls
  return absl::InvalidArgumentError(absl::StrCat(
      "the backend is of another machine than LibTorch's \"", backend.type_name,
      "\": register this machine (RegisterEmuDevice), or make the backend of the registered one (",
      known.message(), ")"));
}

}  // namespace

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
