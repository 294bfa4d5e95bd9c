// Writes in place that raise no version: those of LibTorch's fused optimizers (_fused_adamw_ and
// its like). Of storages that somebody watches they are counted.
//
// The first watch registers kernels for these operators with the dispatcher, in front of LibTorch's
// own, where other operators raise versions.
//
// Thread safety: thread-safe.

#ifndef PINION_HOOKS_PLAN_FUSED_WRITES_H_
#define PINION_HOOKS_PLAN_FUSED_WRITES_H_

#include <c10/core/Storage.h>

#include <atomic>
#include <cstdint>
#include <memory>

namespace pinion {

// How many there are of the storage while someone holds the count. A weak reference to the storage
// has to outlive it: the storage is known by its address.
using FusedWrites = std::shared_ptr<const std::atomic<uint64_t>>;
FusedWrites WatchFusedWrites(const c10::Storage& storage);

}  // namespace pinion

#endif  // PINION_HOOKS_PLAN_FUSED_WRITES_H_
