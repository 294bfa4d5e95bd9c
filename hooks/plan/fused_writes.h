// Counts in-place writes that raise no version: those of LibTorch's fused optimizers
// (_fused_adamw_ and others), on watched storages.
//
// The first watch registers kernels for these operators with the dispatcher, at the key
// ADInplaceOrView, where other operators raise versions.
//
// Thread safety: thread-safe.

#ifndef PINION_HOOKS_PLAN_FUSED_WRITES_H_
#define PINION_HOOKS_PLAN_FUSED_WRITES_H_

#include <c10/core/Storage.h>

#include <atomic>
#include <cstdint>
#include <memory>

namespace pinion {

// The number of such writes to a storage, counted while a FusedWrites of it exists. The caller must
// keep a weak reference to the storage, which is identified by its address.
using FusedWrites = std::shared_ptr<const std::atomic<uint64_t>>;
FusedWrites WatchFusedWrites(const c10::Storage& storage);

}  // namespace pinion

#endif  // PINION_HOOKS_PLAN_FUSED_WRITES_H_
