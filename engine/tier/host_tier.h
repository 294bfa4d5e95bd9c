// Makes host RAM a second tier of all devices of one kind: a pool of pinned memory, and a
// DeviceTier per device.
//
//   PINION_ASSIGN_OR_RETURN(auto tier, HostTier::OfProcess({}, CudaBackend(), source));
//   PINION_ASSIGN_OR_RETURN(std::shared_ptr<DeviceTier> device, tier->ForDevice(0));
//
// A process has one tier for each kind of device, shared by all tenants. So one pool keeps the
// budget of host RAM, and one engine per device bounds the bytes in flight on its link. The tier
// lives as long as it has users.
//
// Thread safety: thread-safe. No lock is held while a device is set up.

#ifndef PINION_ENGINE_TIER_HOST_TIER_H_
#define PINION_ENGINE_TIER_HOST_TIER_H_

#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
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
  AllocatorOptions allocator;  // for the pool
  EngineOptions engine;        // for each device's engine
  // True: the user accepts any engine options. The next user without this flag chooses them, until
  // the first device is set up, which uses the default if nobody chose.
  bool any_engine = false;

  // Returns the first field in which `other` differs, with both values; empty if none differs.
  std::string DifferenceTo(const HostTierOptions& other) const;
};

class HostTier {
 public:
  // Returns the process's tier for the backend's devices, or creates it. A new tier's pool gets its
  // segments from `source`. A program may pass its own `pool` instead; then allocator options are
  // ignored.
  //
  // Returns FailedPrecondition, which names the difference, if the living tier has other options or
  // another pool. A child of fork() does not inherit the parent's tier. Other errors as in
  // PinnedAllocator::Create.
  static absl::StatusOr<std::shared_ptr<HostTier>> OfProcess(
      const HostTierOptions& options, const DeviceBackend& backend,
      std::shared_ptr<HostMemorySource> source, std::shared_ptr<PinnedAllocator> pool = nullptr);

  // `source` is null if the program owns the pool.
  HostTier(const HostTierOptions& options, DeviceBackend backend,
           std::shared_ptr<HostMemorySource> source, std::shared_ptr<PinnedAllocator> pool);

  PinnedAllocator& pool() const { return *pool_; }
  // Returns the source of the pool's segments; null if the program owns the pool.
  const std::shared_ptr<HostMemorySource>& source() const { return source_; }

  // Returns the device's tier, and sets it up at the first call. Errors of the backend.
  absl::StatusOr<std::shared_ptr<DeviceTier>> ForDevice(int index);

 private:
  // Returns the difference between a new user's options or pool and this tier; empty if they fit.
  // Adopts the new user's engine options if none were chosen.
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
