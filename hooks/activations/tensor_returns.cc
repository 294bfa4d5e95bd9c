#include "pinion/hooks/activations/tensor_returns.h"

#include <c10/core/Stream.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "pinion/device/allocation_label.h"
#include "pinion/device/trace/trace_sink.h"
#include "pinion/hooks/autograd/lent_tensors.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/tier/torch_memory.h"

namespace pinion {
namespace {

// Whether a fetch would provide bytes that the device lacks.
bool IsAway(const SavedParcel& parcel) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock) {
  return parcel.state() == Parcel::State::kAway &&
         std::any_of(parcel.records.begin(), parcel.records.end(),
                     [](const auto* record) { return record->identity.expired(); });
}

}  // namespace

// ------------------------------------------------------------------------------------- on demand

BytesOnDevice TensorReturns::Acquire(StorageRecord& record, const Reading& by,
                                     absl::FunctionRef<std::string()> describe) {
  const BoundStream& stream = by.stream;
  const bool is_captured = tier_.engine().IsCapturing(stream.native).value_or(false);
  for (;;) {
    Released released;  // freed after the lock
    BytesOnDevice bytes;
    uint64_t dropped = 0;
    SavedParcel* parcel = nullptr;  // owned by the record
    std::optional<Parcel::Read> read;
    bool is_cast_again = false;
    bool was_ahead = false;
    {
      OffloadLock lock(state_);
      TORCH_CHECK(!is_captured || record.IsNeverOffloaded(),
                  "the stream captures a graph, and backward reads [", describe(),
                  "], which Pinion offloads: replays would read memory that is free by ",
                  "then. Capture its forward as well, or run the forward outside an OffloadScope.");
      parcel = record.in_parcel.parcel().get();
      is_cast_again = record.IsCastAgain();
      bytes = Find(record, released);
      if (bytes.storage) {
        if (parcel != nullptr && parcel->left_in_backward != by.backward) {
          dropped += state_.LetGoOfFetched(parcel->MarkRead(by.reader), *parcel, released);
        }
      } else if (parcel != nullptr) {
        // The original memory, if any, was resized or replaced.
        released.Add(parcel->Evict());
        bytes.shift_bytes = record.ShiftIntoParcel();
        was_ahead = parcel->ReadIfFetched(by.reader, read, state_.AfterReading(*parcel)) &&
                    state_.schedule->OnRead(*parcel);
      }
    }
    if (!bytes.storage && is_cast_again) return CastAgain(record, by, describe);
    TORCH_CHECK(bytes.storage || parcel != nullptr,
                "the storage of a tensor that is needed for gradient computation was shrunk after "
                "the tensor was saved, and nobody has a copy: [",
                describe(), "]. Give it its memory back before backward.");
    if (bytes.storage) {
      stats_.Update([dropped](OffloadStats& stats) {
        ++stats.reused_on_device;
        stats.prefetches_dropped += dropped;
      });
      UseOnStream(bytes.storage, record.pack_stream, stream);
      return bytes;
    }
    if (!read.has_value()) {
      read.emplace(parcel->ReadOrClaim(by.reader));
      if (read->claim.has_value()) {
        FetchNow(*parcel, *std::move(read->claim), by);
        continue;
      }
      OffloadLock lock(state_);
      was_ahead = state_.schedule->OnRead(*parcel);
    }
    if (was_ahead) stats_.Update([](OffloadStats& stats) { ++stats.prefetch_hits; });
    bytes.storage = StorageOf(read->fetched.memory());
    bytes.is_copy = true;
    WaitForCopyIn(read->fetched.copy(), by);
    // The reader's stream has waited, and the framework orders the free after the reader.
    if (stream.native != read->fetched.stream()) RecordOnStream(bytes.storage, stream.torch);
    read->fetched.Disarm();
    if (record.checksum) {
      Verify(record, bytes, [&] {
        return c10::str("a saved tensor has come back changed: ", describe(), ", its ",
                        record.size_bytes(), " bytes copied out by D2H ",
                        parcel->copy_out().number(), " of ", bytes.storage.device(),
                        " and back by H2D ", read->fetched.copy().number());
      });
    }
    return bytes;
  }
}

void TensorReturns::UseOnStream(const c10::Storage& storage, const BoundStream& made_on,
                                const BoundStream& stream) {
  if (stream.torch == made_on.torch) return;
  ThrowIfError(tier_.engine().OrderStreams(made_on.native, stream.native, kUnpackOnOtherStream),
               "ordering backward's stream after forward's");
  RecordOnStream(storage, stream.torch);
}

BytesOnDevice TensorReturns::Find(StorageRecord& record, Released& released) {
  if (record.in_parcel.parcel() != nullptr && record.in_parcel.parcel()->gathered) {
    if (const DeviceMemory gathered = record.in_parcel.parcel()->ShareHeld(0)) {
      return {StorageOf(gathered), record.ShiftIntoParcel()};
    }
  }
  c10::Storage storage = record.leaving.source();
  if (!storage) {
    if (auto impl = record.identity.lock()) storage = c10::Storage(std::move(impl));
  }
  if (!storage) return {};
  // A record without a copy is read as it is, as without offload: sharded training frees gathered
  // parameters after forward and gathers them into other memory for backward.
  const bool is_kept = record.in_parcel.parcel() == nullptr && !record.IsCastAgain();
  const bool is_readable = is_kept && storage.nbytes() >= record.extent.end_bytes;
  if (!record.HasItsMemory(storage) && !is_readable) {
    released.plain.push_back(std::move(storage));  // may be the last reference
    return {};
  }
  return {std::move(storage), /*shift_bytes=*/0};
}

// Many tensors share a copy, and later copies finish after earlier ones, so a repeated wait is
// skipped. Remembered only within a backward, since stream handles are reused.
void TensorReturns::WaitForCopyIn(const Transfer& copy, const Reading& by) {
  using Waiter = std::tuple<uint64_t, int64_t, c10::StreamId>;  // OffloadState::id, the backward
  thread_local std::pair<Waiter, uint64_t> last = {{0, -1, 0}, 0};
  const std::pair<Waiter, uint64_t> wait = {{state_.id, by.backward, by.stream.torch.id()},
                                            copy.number()};
  if (by.backward != -1 && last.first == wait.first && last.second >= wait.second) return;
  ThrowIfError(copy.WaitOn(by.stream.native, kUnpackAfterCopyIn), "waiting for a saved tensor");
  last = wait;
}

void TensorReturns::Verify(const StorageRecord& record, const BytesOnDevice& bytes,
                           absl::FunctionRef<std::string()> tell) {
  const uint64_t begin_bytes = record.extent.begin_bytes + bytes.shift_bytes;
  const uint64_t saved = record.checksum.value();
  const uint64_t found =
      TensorChecksum::Of(bytes.storage, {begin_bytes, begin_bytes + record.size_bytes()}).value();
  if (found == saved) {
    stats_.Update([](OffloadStats& stats) { ++stats.verified; });
    return;
  }
  TORCH_CHECK(false, "Pinion, in verify mode: ", tell(), "; their checksum was ", saved, " and is ",
              found);
}

BytesOnDevice TensorReturns::CastAgain(StorageRecord& record, const Reading& by,
                                       absl::FunctionRef<std::string()> describe) {
  const BoundStream& stream = by.stream;
  std::optional<BoundStream> made_on;
  c10::Storage last;
  {
    OffloadLock lock(state_);
    if (record.last_cast.has_value()) {
      made_on = record.last_cast->stream;
      if (auto impl = record.last_cast->storage.lock()) last = c10::Storage(std::move(impl));
    }
  }
  if (last) {
    stats_.Update([](OffloadStats& stats) { ++stats.reused_on_device; });
    UseOnStream(last, *made_on, stream);
    return {std::move(last)};
  }
  const ParameterCast& cast = *record.cast;
  TORCH_CHECK(cast.IsUnchanged(),
              "one of the variables needed for gradient computation is the cast of a parameter "
              "that was changed in place, or given other memory, after it was cast: [",
              describe(), "], cast from [", cast.Describe(),
              "]. Pinion casts the parameter once more instead of keeping the cast: change it "
              "after backward, or set OffloadOptions::cast_weights_again to false.");
  UseOnStream(cast.parameter().storage(), record.pack_stream, stream);
  const AllocationLabel label("weights cast again by Pinion");
  BytesOnDevice bytes;
  try {
    bytes.storage = cast.Again();
  } catch (const c10::OutOfMemoryError&) {
    FreeUnneeded();
    bytes.storage = cast.Again();
  }
  bytes.cast_again = true;
  stats_.Update([](OffloadStats& stats) { ++stats.recast; });
  if (record.checksum) {
    Verify(record, bytes, [&] {
      return c10::str("a weight that was cast again has come back changed: ", describe(), ", its ",
                      record.size_bytes(), " bytes cast from ", cast.Describe(),
                      ", which must have been changed in a way that raises no version");
    });
  }
  const bool comes_again = by.backward == -1 || BackwardKeepsGraph();
  OffloadLock lock(state_);
  // A record's only reader, which does not read again, may own and modify the bytes.
  bytes.is_copy = record.live_handles == 1 && !comes_again;
  if (!bytes.is_copy) record.last_cast = {bytes.storage.getWeakStorageImpl(), stream};
  return bytes;
}

c10::Storage TensorReturns::AllocateOrNameTarget(const BoundStream& stream,
                                                 uint64_t size_bytes) const {
  try {
    return AllocateStorage(stream.torch, size_bytes);
  } catch (c10::OutOfMemoryError& error) {
    if (state_.asks_for_device_bytes) {
      error.add_context(c10::str("fetching ", size_bytes, " bytes for backward: the device has ",
                                 state_.DeviceBytes(stream.torch.device()),
                                 " bytes, and OffloadOptions::memory_target_bytes is ",
                                 options_.memory_target_bytes));
    }
    throw;
  }
}

void TensorReturns::FetchNow(SavedParcel& parcel, FetchClaim claim, const Reading& by) {
  const BoundStream& stream = by.stream;
  const ScopedRange range(trace(), "pinion.fetch", parcel.size_bytes);
  const AllocationLabel label("saved tensors fetched by Pinion");
  c10::Storage storage;
  try {
    storage = AllocateStorage(stream.torch, parcel.size_bytes);
  } catch (const c10::OutOfMemoryError&) {
    FreeUnneeded();
    storage = AllocateOrNameTarget(stream, parcel.size_bytes);
  }
  Arrival arrival = {std::move(claim), TorchMemory(std::move(storage))};
  GuardedMemories unneeded;
  const absl::StatusOr<Transfer> copy =
      tier_.Fetch(absl::MakeSpan(&arrival, 1), stream.native, unneeded);
  const bool is_safe = copy.ok() || parcel.copy_out().IsDone();
  ThrowIfError(copy.status(), is_safe
                                  ? "fetching a saved tensor (its bytes are safe in host memory)"
                                  : "fetching a saved tensor");
  if (!options_.overlap) {
    ThrowIfError(copy->Wait(absl::InfiniteDuration()), "waiting for a saved tensor");
  }
  stats_.Update([&](OffloadStats& stats) {
    ++stats.fetched_on_demand;
    stats.fetched_bytes += parcel.size_bytes;
  });
  OffloadLock lock(state_);
  state_.schedule->OnFetched(parcel, by.backward);
}

// ---------------------------------------------------------------------------------------- ahead

void TensorReturns::Prefetch(const StorageRecord& record, int64_t backward) {
  if (!options_.overlap) return;
  for (;;) {
    Arrivals wanted;  // share the parcels until after the lock
    bool is_all = false;
    const uint64_t device_bytes = state_.DeviceBytes(record.pack_stream.torch.device());
    {
      OffloadLock lock(state_);
      state_.TellDeviceBytes(device_bytes);
      const OffloadSchedule::Fetches fetches = state_.schedule->TakeFetches(
          record.place(), backward,
          [](const ScheduledParcel& parcel) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock) {
            return IsAway(static_cast<const SavedParcel&>(parcel));
          });
      for (ScheduledParcel* scheduled : fetches.parcels) {
        auto& parcel = static_cast<SavedParcel&>(*scheduled);
        std::optional<FetchClaim> claim = parcel.ClaimIfAway();
        if (claim.has_value()) {
          wanted.push_back({*std::move(claim), DeviceMemory()});
        } else {
          state_.schedule->OnDropped(parcel);  // another thread fetches it
        }
      }
      is_all = fetches.is_all;
      stats_.Update([&](OffloadStats& stats) { stats.prefetch_looks += fetches.looks; });
    }
    if (wanted.empty() || !FetchAhead(wanted, backward) || is_all) return;
  }
}

bool TensorReturns::FetchAhead(Arrivals& wanted, int64_t backward) {
  uint64_t bytes = 0;
  ScheduledParcels parcels;
  for (const Arrival& next : wanted) {
    parcels.push_back(static_cast<SavedParcel*>(&next.claim.parcel()));
    bytes += parcels.back()->size_bytes;
  }
  const ScopedRange range(trace(), "pinion.prefetch", bytes);
  const BoundStream& stream = static_cast<SavedParcel*>(parcels.front())->pack_stream;
  GuardedMemories unneeded;
  absl::StatusOr<Transfer> copy;  // an error until the copy is submitted
  bool room_was_made = false;
  try {
    const AllocationLabel label("saved tensors fetched by Pinion");
    const int64_t retries = AllocationRetries(stream.torch.device());
    for (auto& [claim, memory] : wanted) {
      memory = TorchMemory(AllocateStorage(stream.torch, claim.parcel().size_bytes));
    }
    room_was_made = AllocationRetries(stream.torch.device()) > retries;
    copy = tier_.Fetch(absl::MakeSpan(wanted), stream.native, unneeded);
  } catch (const std::exception&) {  // most likely out of memory
  }
  if (!copy.ok()) {
    for (auto& [claim, memory] : wanted) {
      memory = DeviceMemory();
      claim.Fail();
    }
  }
  stats_.Update([&](OffloadStats& stats) {
    copy.ok() ? stats.fetched_bytes += bytes : stats.prefetches_refused += wanted.size();
  });
  OffloadLock lock(state_);
  if (copy.ok()) {
    for (ScheduledParcel* parcel : parcels) state_.schedule->OnFetched(*parcel, backward);
    state_.schedule->OnFetchesMade(room_was_made);
    return true;
  }
  state_.schedule->OnFetchesRefused(parcels);
  return false;
}

// ----------------------------------------------------------------------------------------- free

void TensorReturns::FreeUnneeded() {
  SettleLoans();
  Released released;
  uint64_t dropped = 0;
  OffloadLock lock(state_);
  const std::vector<ScheduledParcel*> ahead = state_.schedule->FetchedAhead();
  state_.schedule->OnRoomWanted();
  for (ScheduledParcel* scheduled : ahead) {
    auto& parcel = static_cast<SavedParcel&>(*scheduled);
    dropped += state_.LetGoOfFetched(parcel.TakeFetched(), parcel, released);
  }
  state_.books.late.Take(released);
  stats_.Update([dropped](OffloadStats& stats) { stats.prefetches_dropped += dropped; });
}

void TensorReturns::EndBackward(int64_t backward) {
  Released released;
  uint64_t dropped = 0;
  OffloadLock lock(state_);
  state_.backwards.erase(backward);
  state_.schedule->OnBackwardEnd(backward);
  for (ScheduledParcel* scheduled : state_.schedule->FetchedIn(backward)) {
    auto& parcel = static_cast<SavedParcel&>(*scheduled);
    dropped += state_.LetGoOfFetched(parcel.TakeFetched(), parcel, released);
  }
  state_.books.late.Take(released);
  stats_.Update([dropped](OffloadStats& stats) { stats.prefetches_dropped += dropped; });
}

}  // namespace pinion
