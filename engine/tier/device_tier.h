// One device's part of the host tier: carries parcels out and back. All tenants of the device
// (saved activations, LibTorch's pinned memory) share it, and with it one engine, so that what is
// in flight on the link is bounded once.
//
//   PINION_ASSIGN_OR_RETURN(auto parcel, tier->NewParcel(size_bytes, stream));
//   std::vector<Departure> all(1);
//   all[0].parcel = parcel;
//   all[0].pieces = {{data, /*offset_bytes=*/0, size_bytes}};
//   all[0].memory.push_back(std::move(memory));
//   PINION_RETURN_IF_ERROR(tier->PutOut(absl::MakeSpan(all)));
//   parcel->Evict();                             // the stream waits for the copy, not the host
//   ...
//   Parcel::Read read = parcel->ReadOrClaim(reader);
//   if (read.claim.has_value()) { /* device memory for it; tier->Fetch(...); try again */ }
//
// Thread safety: thread-safe; no lock of its own is held across a device call.
// Ownership: shared; parcels and what they let go of keep the engine alive by their transfers.

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
#include "pinion/engine/tier/device_memory.h"
#include "pinion/engine/tier/device_share.h"
#include "pinion/engine/tier/guarded_memory.h"
#include "pinion/engine/tier/parcel.h"
#include "pinion/engine/transfer_engine.h"

namespace pinion {

// What a copy out reads, and where in the parcel it goes.
struct DeparturePiece {
  void* data = nullptr;  // on the device; the copy only reads it
  uint64_t offset_bytes = 0;
  uint64_t size_bytes = 0;
};

struct Departure {
  std::shared_ptr<Parcel> parcel;
  absl::InlinedVector<DeparturePiece, 1> pieces;
  Parcel::HeldMemory memory;  // all that the pieces lie in
};

// A fetch that is to be submitted.
struct Arrival {
  FetchClaim claim;
  DeviceMemory memory;  // of the parcel's size
};

class DeviceTier {
 public:
  // Measuring the link borrows some of `pool`.
  DeviceTier(std::shared_ptr<TransferEngine> engine, std::shared_ptr<PinnedAllocator> pool);

  // For tickets and waits; what is submitted to it shares its window.
  TransferEngine& engine() const { return *engine_; }

  // What its tenants tell each other about the device's memory.
  const std::shared_ptr<DeviceShare>& share() const { return share_; }

  // What the link can do, for those who plan. It is measured once, which takes up to a few hundred
  // milliseconds, and would break a graph that `stream` captures: a link that cannot be measured
  // now is taken for a PCIe 4 one (AssumedLink), and the log says so.
  LinkCalibration Link(StreamHandle stream) const;

  // A parcel that rests in the pool, or a tenant's own kind of parcel, whose constructor takes
  // `rest` behind what Parcel's does. Errors as those of PinnedAllocator::Allocate.
  template <typename Kind = Parcel, typename... Rest>
  absl::StatusOr<std::shared_ptr<Kind>> NewParcel(uint64_t size_bytes, StreamHandle stream,
                                                  const Rest&... rest) {
    return NewParcelIn<Kind>(/*backing=*/nullptr, size_bytes, stream, rest...);
  }
  // The same, resting in `backing`; null: in the pool. Errors as those of Backing::Reserve.
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

  // Parcels of one stream, at least one, leave in one batch, after that stream's present work. On
  // an error none of them has left, and the departures still have their memory; where a copy may
  // run all the same it has been leaked. Errors as those of TransferEngine::Submit.
  absl::Status PutOut(absl::Span<Departure> departures);

  // Parcels come back in one copy, after the present work of `stream`, to which their memory
  // belongs. The caller bounds what is under way. `unneeded` gets what nobody is left to read. On
  // an error nothing has been fetched: whoever waits for one of the parcels tries by itself, once
  // the arrivals have let go of their claims.
  absl::StatusOr<Transfer> Fetch(absl::Span<Arrival> arrivals, StreamHandle stream,
                                 GuardedMemories& unneeded);

 private:
  // Whether a copy that could not be submitted may run all the same.
  bool IsPoisoned() const { return !engine_->health().ok(); }

  const std::shared_ptr<TransferEngine> engine_;
  const std::shared_ptr<PinnedAllocator> pool_;
  PinnedBacking in_pool_;
  const std::shared_ptr<DeviceShare> share_ = std::make_shared<DeviceShare>();
};

}  // namespace pinion

#endif  // PINION_ENGINE_TIER_DEVICE_TIER_H_
