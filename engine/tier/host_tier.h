// The host's memory as a second tier of all devices of one kind: the pool of pinned memory, and one
// DeviceTier per device (device_tier.h), set up when it is first used.
//
//   PINION_ASSIGN_OR_RETURN(auto tier, HostTier::OfProcess({}, CudaBackend(), source));
//   PINION_ASSIGN_OR_RETURN(std::shared_ptr<DeviceTier> device, tier->ForDevice(0));
//
// A process has one for each kind of device, which all tenants share: one pool, so that the budget
// for the host's RAM is kept by all together, and one engine per device, so that what is in flight
// on a link is bounded once. It lives as long as somebody uses it.
//
// Thread safety: thread-safe. No lock is held while a device is set up.

#ifndef PINION_ENGINE_TIER_HOST_TIER_H_
#define PINION_ENGINE_TIER_HOST_TIER_H_

#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/device/device_backend.h"
#include "pinion/engine/tier/device_tier.h"
#include "pinion/engine/transfer_engine.h"

namespace pinion {

struct HostTierOptions {
  AllocatorOptions allocator;  // of the pool
  EngineOptions engine;        // of each device's engine
  // For a user of the pool who is content with whatever engine others choose. The next user
  // chooses, as long as no device is set up; until then it is the default one.
  bool any_engine = false;

  // The first field in which the other options differ, with both values; empty: none.
  std::string DifferenceTo(const HostTierOptions& other) const;
};

class HostTier {
 public:
  // The process's tier for the backend's devices: the one that lives, or else a new one with a pool
  // whose segments come from `source`, or with `pool`, a program's own, in its place.
  // FailedPrecondition names what differs where one lives that was made with other options, or with
  // another pool. Where the pool is a program's own, nobody's options for it are looked at. In a
  // child of fork() the parent's does not live. Errors as those of PinnedAllocator::Create.
  static absl::StatusOr<std::shared_ptr<HostTier>> OfProcess(
      const HostTierOptions& options, const DeviceBackend& backend,
      std::shared_ptr<HostMemorySource> source, std::shared_ptr<PinnedAllocator> pool = nullptr);

  // `source` is null for a pool of the program's own.
  HostTier(const HostTierOptions& options, DeviceBackend backend,
           std::shared_ptr<HostMemorySource> source, std::shared_ptr<PinnedAllocator> pool);

  PinnedAllocator& pool() const { return *pool_; }
  // Where the pool's segments come from; null for a pool of the program's own.
  const std::shared_ptr<HostMemorySource>& source() const { return source_; }

  // The device's, which is set up at its first use. The backend's own error if there is none.
  absl::StatusOr<std::shared_ptr<DeviceTier>> ForDevice(int index);

 private:
  // What a further user's options, and a pool if there is one, have against this tier; empty:
  // nothing. Takes over an engine's options where nobody has chosen them.
  std::string Join(const HostTierOptions& options, const PinnedAllocator* pool);

  const DeviceBackend backend_;
  const std::shared_ptr<HostMemorySource> source_;
  const std::shared_ptr<PinnedAllocator> pool_;

  Mutex mu_;
  HostTierOptions options_ ABSL_GUARDED_BY(mu_);
  std::map<int, std::shared_ptr<DeviceTier>> devices_ ABSL_GUARDED_BY(mu_);
};

}  // namespace pinion

#endif  // PINION_ENGINE_TIER_HOST_TIER_H_
