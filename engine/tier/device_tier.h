// Offloads parcels of one device to the host and fetches them back.
//
//   PINION_ASSIGN_OR_RETURN(auto parcel, tier->NewParcel(size_bytes, stream));
//   std::vector<Departure> all(1);
//   all[0].parcel = parcel;
//   all[0].pieces = {{data, /*offset_bytes=*/0, size_bytes}};
//   all[0].memory.push_back(std::move(memory));
//   PINION_RETURN_IF_ERROR(tier->PutOut(absl::MakeSpan(all)));
//   const GuardedMemory evicted = parcel->Evict();  // its stream waits for the copy, then frees
//   ...
//   Parcel::Read read = parcel->ReadOrClaim(reader);
//   if (read.claim.has_value()) { /* device memory for it; tier->Fetch(...); try again */ }
//
// All tenants of the device (saved activations, LibTorch's pinned memory) share it and its engine,
// so one window bounds the bytes in flight on the link.
//
// Thread safety: thread-safe; no lock is held across a device call.
// Ownership: shared; parcels and their released memory keep the engine alive by their transfers.

#ifndef PINION_ENGINE_TIER_DEVICE_TIER_H_
#define PINION_ENGINE_TIER_DEVICE_TIER_H_

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/slab.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/device/device.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/tier/backing.h"
#include "pinion/engine/tier/device_share.h"
#include "pinion/engine/tier/guarded_memory.h"
#include "pinion/engine/tier/parcel.h"
#include "pinion/engine/transfer_engine.h"

namespace pinion {

// Source of a copy out, and its place in the parcel.
struct DeparturePiece {
  void* data = nullptr;  // on the device; only read
  uint64_t offset_bytes = 0;
  uint64_t size_bytes = 0;
};

struct Departure {
  std::shared_ptr<Parcel> parcel;
  absl::InlinedVector<DeparturePiece, 1> pieces;
  Parcel::HeldMemory memory;  // all memory that contains the pieces
};

// A parcel to fetch.
struct Arrival {
  FetchClaim claim;
  DeviceMemory memory;  // of the parcel's size
};

class DeviceTier {
 public:
  // Parcels are stored in `pool`; measuring the link borrows some of it.
  DeviceTier(std::shared_ptr<TransferEngine> engine, std::shared_ptr<PinnedAllocator> pool);

  // Returns the engine, for tickets and waits. Copies submitted to it share its window.
  TransferEngine& engine() const { return *engine_; }

  // Returns the state that tenants share about the device's memory.
  const std::shared_ptr<DeviceShare>& share() const { return share_; }

  // Returns the link's calibration, for planning. The first call measures, which takes up to a few
  // hundred milliseconds. If the link cannot be measured, for example while `stream` captures a
  // graph, returns a PCIe 4 link (AssumedLink) and logs it.
  LinkCalibration Link(StreamHandle stream) const;

  // Creates a parcel that is stored in the pool. `Kind` may be a tenant's subclass, whose
  // constructor takes Parcel's arguments and then `rest`. Errors as in PinnedAllocator::Allocate:
  // ResourceExhausted if the pool is full. May block for AllocatorOptions::max_wait_for_deferred.
  template <typename Kind = Parcel, typename... Rest>
  absl::StatusOr<std::shared_ptr<Kind>> NewParcel(uint64_t size_bytes, StreamHandle stream,
                                                  const Rest&... rest) {
    return NewParcelIn<Kind>(/*backing=*/nullptr, size_bytes, stream, rest...);
  }
  // Creates a parcel that is stored in `backing` (null: the pool). Errors as in Backing::Reserve.
  template <typename Kind = Parcel, typename... Rest>
  absl::StatusOr<std::shared_ptr<Kind>> NewParcelIn(Backing* backing, uint64_t size_bytes,
                                                    StreamHandle stream, const Rest&... rest) {
    Backing& chosen = backing == nullptr ? in_pool_ : *backing;
    PINION_ASSIGN_OR_RETURN(std::shared_ptr<ParcelPlace> place, chosen.Reserve(pool_, size_bytes));
    PINION_CHECK(place != nullptr) << "Backing::Reserve returned null for " << size_bytes
                                   << " bytes: return ResourceExhausted where there is no room";
    return std::allocate_shared<Kind>(SlabAllocator<Kind>(), size_bytes, stream, std::move(place),
                                      rest...);
  }

  // Offloads parcels of one stream (at least one) in one batch, after that stream's present work.
  // On an error no parcel has left, and the departures keep their memory. Exception: memory that a
  // copy may still read is leaked. Errors as in TransferEngine::Submit.
  absl::Status PutOut(absl::Span<Departure> departures);

  // Fetches parcels by one copy, after the present work of `stream`, which owns the arrivals'
  // memory. The caller bounds the bytes in flight. Fetched memory without a remaining reader goes
  // to `unneeded`. On an error nothing is fetched; readers retry after the arrivals' destruction.
  absl::StatusOr<Transfer> Fetch(absl::Span<Arrival> arrivals, StreamHandle stream,
                                 GuardedMemories& unneeded);

 private:
  // Returns true if a copy that failed to submit may run all the same.
  bool IsPoisoned() const { return !engine_->health().ok(); }

  const std::shared_ptr<TransferEngine> engine_;
  const std::shared_ptr<PinnedAllocator> pool_;
  PinnedBacking in_pool_;
  const std::shared_ptr<DeviceShare> share_ = std::make_shared<DeviceShare>();
};

}  // namespace pinion

#endif  // PINION_ENGINE_TIER_DEVICE_TIER_H_
