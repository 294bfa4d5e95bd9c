// How a unit's bytes come to the device.

#include <c10/util/Exception.h>

#include <exception>
#include <optional>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/types/span.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/device/allocation_label.h"
#include "pinion/hooks/tier/torch_memory.h"
#include "pinion/hooks/weights/device_weights.h"

namespace pinion {
namespace {

constexpr char kFetching[] = "fetching a layer's weights";

WeightMemory Allocate(const std::shared_ptr<DeviceShare>& share,
                      const std::shared_ptr<Visitor>& visitor, uint64_t size_bytes,
                      const BoundStream& stream) {
  const AllocationLabel label("weights fetched by Pinion");
  WeightMemory memory = {VisitingBytes(share, visitor, size_bytes), {}};
  memory.storage = AllocateStorage(stream.torch, size_bytes);
  memory.bytes.CountAllocation();
  return memory;
}

}  // namespace

void DeviceWeights::Arrive(uint32_t index, const BoundStream& stream) {
  GuardedMemory fetched = WaitForCopy(index, stream);
  std::vector<c10::DataPtr> away;
  MutexLock lock(mu_);
  Unit& unit = units_[index];
  if (!unit.IsReadyOn(stream)) unit.streams.push_back(stream);
  if (unit.memory) return;  // another thread was faster
  unit.memory = std::move(fetched);
  schedule_.OnHere(index);
  away = unit.parts.PointTo(unit.memory.memory().data(), *this, device_);
}

void DeviceWeights::ArriveWide(uint32_t index, const BoundStream& stream) {
  std::optional<BoundStream> widened_on;
  std::vector<WeightPiece> pieces;
  uint64_t wide_bytes = 0;
  {
    MutexLock lock(mu_);
    Unit& unit = units_[index];
    while (unit.is_being_widened) widened_.Wait(mu_);
    if (unit.wide) {
      widened_on = unit.streams.front();
    } else {
      unit.is_being_widened = true;
      pieces = unit.parts.pieces;
      wide_bytes = unit.parts.device_bytes;
    }
  }
  if (widened_on.has_value()) {
    ThrowIfError(
        tier_->engine().OrderStreams(widened_on->native, stream.native, kWeightAfterWidening),
        "waiting for a layer's weights");
    MutexLock lock(mu_);
    Unit& unit = units_[index];
    if (!unit.IsReadyOn(stream)) unit.streams.push_back(stream);
    return;
  }
  const absl::Cleanup end = [this, index] {
    MutexLock lock(mu_);
    units_[index].is_being_widened = false;
    widened_.NotifyAll();
  };
  GuardedMemory fetched = WaitForCopy(index, stream);
  WeightMemory memory = AllocateNow(index, wide_bytes, stream);
  c10::Storage& wide = memory.storage;
  {
    // Gone before its bytes are counted as gone.
    const c10::Storage resting = StorageOf(fetched.memory());
    for (const WeightPiece& piece : pieces) {
      Widen({resting, piece.resting_offset_bytes}, piece.form, {wide, piece.offset_bytes});
    }
  }
  fetched.Disarm();  // another reference to what the parcel has
  AllDropped copied(1);
  copied[0].memory = parcels_[index]->TakeFetched();
  copied[0].streams.push_back(stream);
  std::vector<c10::DataPtr> away;
  {
    MutexLock lock(mu_);
    Unit& unit = units_[index];
    void* const data = wide.mutable_data();
    unit.wide = std::move(wide);
    copied[0].bytes = std::exchange(unit.bytes, std::move(memory.bytes));
    unit.streams = {stream};
    schedule_.OnHere(index);
    away = unit.parts.PointTo(data, *this, device_);
  }
  LetGoOf(copied, tier_->engine());
}

GuardedMemory DeviceWeights::WaitForCopy(uint32_t index, const BoundStream& stream) {
  const std::shared_ptr<WeightParcel>& parcel = parcels_[index];
  for (;;) {
    Parcel::Read read = parcel->ReadOrClaim(parcel->reader);
    if (!read.claim.has_value()) {
      ThrowIfError(read.fetched.copy().WaitOn(stream.native, kWeightAfterCopyIn), kFetching);
      return std::move(read.fetched);
    }
    WeightMemory memory = AllocateNow(index, parcel->size_bytes, stream);
    ThrowIfError(Fetch(index, *read.claim, std::move(memory), stream, /*is_ahead=*/false),
                 kFetching);
  }
}

WeightMemory DeviceWeights::AllocateNow(uint32_t index, uint64_t size_bytes,
                                        const BoundStream& stream) {
  try {
    return Allocate(tier_->share(), visitor_, size_bytes, stream);
  } catch (const c10::OutOfMemoryError&) {
    DropAllIdle();
  }
  try {
    return Allocate(tier_->share(), visitor_, size_bytes, stream);
  } catch (const c10::OutOfMemoryError& error) {
    MutexLock lock(mu_);
    TORCH_CHECK_WITH(OutOfMemoryError, false, "the weights of \"", units_[index].parts.name,
                     "\" need ", size_bytes,
                     " bytes of the device at once, and it has no room for them with all other "
                     "weights away: ",
                     error.what_without_backtrace());
  }
}

absl::Status DeviceWeights::Fetch(uint32_t index, FetchClaim& claim, WeightMemory memory,
                                  const BoundStream& stream, bool is_ahead) {
  const uint64_t size_bytes = claim.parcel().size_bytes;
  VisitingBytes refused;  // goes behind the memory
  Arrival arrival = {std::move(claim), TorchMemory(std::move(memory.storage))};
  GuardedMemories unneeded;
  {
    // Before anybody sees the copy: whoever widens it puts those of the wide form in their place.
    MutexLock lock(mu_);
    units_[index].bytes = std::move(memory.bytes);
  }
  const absl::Status fetched =
      tier_->Fetch(absl::MakeSpan(&arrival, 1), stream.native, unneeded).status();
  MutexLock lock(mu_);
  if (!fetched.ok()) {
    refused = std::move(units_[index].bytes);
    return fetched;
  }
  ++stats_.fetches;
  stats_.fetched_ahead += is_ahead ? 1 : 0;
  stats_.fetched_bytes += size_bytes;
  return absl::OkStatus();
}

void DeviceWeights::FetchAhead(uint32_t index, const BoundStream& stream) {
  std::optional<FetchClaim> claim = parcels_[index]->ClaimIfAway();
  if (!claim.has_value()) return;
  {
    // What is widened was let go of as it was fetched.
    MutexLock lock(mu_);
    const Unit& unit = units_[index];
    if (unit.is_being_widened || unit.wide) return;
  }
  try {
    WeightMemory memory = Allocate(tier_->share(), visitor_, claim->parcel().size_bytes, stream);
    if (Fetch(index, *claim, std::move(memory), stream, /*is_ahead=*/true).ok()) return;
  } catch (const std::exception&) {
    // Out of memory, most likely.
  }
  claim.reset();  // it has failed: whoever needs the unit tries again
  MutexLock lock(mu_);
  ++stats_.fetches_refused;
  NoteFailure(index);
}

}  // namespace pinion
