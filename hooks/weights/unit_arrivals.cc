#include "pinion/hooks/weights/unit_arrivals.h"

#include <c10/util/Exception.h>

#include <exception>
#include <optional>
#include <utility>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/device/allocation_label.h"
#include "pinion/hooks/tier/torch_memory.h"

namespace pinion {
namespace {

constexpr char kFetching[] = "fetching a layer's weights";

}  // namespace

void UnitArrivals::Arrive(uint32_t index, const BoundStream& stream) {
  const std::shared_ptr<WeightParcel>& parcel = parcels_[index];
  for (;;) {
    Parcel::Read read = parcel->ReadOrClaim(parcel->reader);
    if (!read.claim.has_value()) {
      ThrowIfError(read.fetched.copy().WaitOn(stream.native, kWeightAfterCopyIn), kFetching);
      std::vector<c10::DataPtr> away;
      MutexLock lock(state_.mu);
      away = state_.units.OnArrived(index, stream, read.fetched);
      return;
    }
    WeightMemory memory = AllocateNow(index, parcel->size_bytes, stream);
    ThrowIfError(Fetch(index, *read.claim, std::move(memory), stream, /*is_ahead=*/false),
                 kFetching);
  }
}

WeightMemory UnitArrivals::Allocate(uint64_t size_bytes, const BoundStream& stream) const {
  const AllocationLabel label("weights fetched by Pinion");
  WeightMemory memory = {VisitingBytes(tier_->share(), visitor_, size_bytes), {}};
  memory.storage = AllocateStorage(stream.torch, size_bytes);
  memory.bytes.CountAllocation();
  return memory;
}

WeightMemory UnitArrivals::AllocateNow(uint32_t index, uint64_t size_bytes,
                                       const BoundStream& stream) {
  try {
    return Allocate(size_bytes, stream);
  } catch (const c10::OutOfMemoryError&) {
    AllDropped dropped;
    {
      MutexLock lock(state_.mu);
      state_.units.DropAllIdle(dropped);
    }
    LetGoOf(dropped, tier_->engine());
  }
  try {
    return Allocate(size_bytes, stream);
  } catch (const c10::OutOfMemoryError& error) {
    MutexLock lock(state_.mu);
    TORCH_CHECK_WITH(OutOfMemoryError, false, "the weights of \"", state_.units[index].parts.name,
                     "\" need ", size_bytes,
                     " bytes of the device at once, and it has no room for them with all other "
                     "weights away: ",
                     error.what_without_backtrace());
  }
}

absl::Status UnitArrivals::WaitForCopies() const {
  for (const std::shared_ptr<WeightParcel>& parcel : parcels_) {
    PINION_RETURN_IF_ERROR(parcel->ViewOnHost(absl::InfiniteDuration()).status());
  }
  return absl::OkStatus();
}

absl::Status UnitArrivals::Fetch(uint32_t index, FetchClaim& claim, WeightMemory memory,
                                 const BoundStream& stream, bool is_ahead) {
  const uint64_t size_bytes = claim.parcel().size_bytes;
  VisitingBytes refused;  // is destroyed after the memory
  Arrival arrival = {std::move(claim), TorchMemory(std::move(memory.storage))};
  GuardedMemories unneeded;
  {
    // Before another thread can see the copy, and evict it.
    MutexLock lock(state_.mu);
    state_.units[index].bytes = std::move(memory.bytes);
  }
  const absl::Status fetched =
      tier_->Fetch(absl::MakeSpan(&arrival, 1), stream.native, unneeded).status();
  MutexLock lock(state_.mu);
  if (!fetched.ok()) {
    refused = std::move(state_.units[index].bytes);
    return fetched;
  }
  state_.units.CountFetch(size_bytes, is_ahead);
  return absl::OkStatus();
}

void UnitArrivals::FetchAhead(uint32_t index, const BoundStream& stream) {
  std::optional<FetchClaim> claim = parcels_[index]->ClaimIfAway();
  if (!claim.has_value()) return;
  bool may_try = false;
  {
    MutexLock lock(state_.mu);
    may_try = back_off_.MayTry();
  }
  bool is_fetched = false;
  bool room_was_made = false;
  if (may_try) {
    try {
      const int64_t retries = AllocationRetries(stream.torch.device());
      WeightMemory memory = Allocate(claim->parcel().size_bytes, stream);
      room_was_made = AllocationRetries(stream.torch.device()) > retries;
      is_fetched = Fetch(index, *claim, std::move(memory), stream, /*is_ahead=*/true).ok();
    } catch (const std::exception&) {
      // Out of memory, most likely.
    }
  }
  if (!is_fetched) claim.reset();  // lets the next user of the unit fetch it
  MutexLock lock(state_.mu);
  // A failing allocation is expensive: LibTorch's CUDA allocator frees its cache.
  if (may_try) is_fetched && !room_was_made ? back_off_.Worked() : back_off_.Refused();
  if (!is_fetched) state_.units.OnFetchRefused(index, /*was_tried=*/may_try);
}

}  // namespace pinion
