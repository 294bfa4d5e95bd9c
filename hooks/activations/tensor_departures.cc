#include "pinion/hooks/activations/tensor_departures.h"

#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/time/time.h"
#include "pinion/allocator/base/check.h"
#include "pinion/device/allocation_bytes.h"
#include "pinion/device/trace/trace_sink.h"
#include "pinion/engine/link/packing.h"
#include "pinion/hooks/autograd/gather.h"
#include "pinion/hooks/tier/torch_memory.h"

namespace pinion {
namespace {

// Returns where the record's bytes begin, to be read only. Not mutable_data(), which would make a
// lazily cloned storage copy itself.
char* DataOf(const StorageRecord& record) {
  return static_cast<char*>(const_cast<void*>(record.data)) + record.extent.begin_bytes;
}

// Returns the size of the parcel's records with live handles.
uint64_t RecordBytes(const SavedParcel& parcel) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock) {
  uint64_t bytes = 0;
  for (const StorageRecord* record : parcel.records) bytes += record->size_bytes();
  return bytes;
}

}  // namespace

void TensorDepartures::Keep(absl::Span<const RecordPtr> records, uint64_t OffloadStats::*reason) {
  uint64_t bytes = 0;
  for (const RecordPtr& record : records) bytes += record->size_bytes();
  stats_.Update([&](OffloadStats& stats) {
    stats.*reason += records.size();
    stats.offloaded -= records.size();
    stats.offloaded_bytes -= bytes;
  });
}

// ------------------------------------------------------------------------------------- copy out

void TensorDepartures::CopyOut(DueRecords& due) {
  const absl::Span<const RecordPtr> staying =
      absl::MakeConstSpan(due.records).subspan(due.sources.size());
  if (!staying.empty()) Keep(staying, &OffloadStats::kept_held);
  if (!options_.overlap) {
    due.ends.resize(due.sources.size());  // each tensor leaves by itself
    std::iota(due.ends.begin(), due.ends.end(), size_t{1});
  }
  size_t begin = 0;
  for (const size_t end : due.ends) {
    const auto batch = absl::MakeConstSpan(due.records).subspan(begin, end - begin);
    const auto sources = absl::MakeSpan(due.sources).subspan(begin, end - begin);
    begin = end;
    // A gather or a checksum on a stream that captures would become part of the graph.
    const absl::StatusOr<bool> capturing =
        tier_.engine().IsCapturing(batch.front()->pack_stream.native);
    if (!capturing.ok() || *capturing) {
      Keep(batch, capturing.ok() ? &OffloadStats::kept_capturing : &OffloadStats::kept_copy_failed);
      continue;
    }
    absl::InlinedVector<ParcelDraft, 1> all = PlanParcels(batch, sources);
    if (all.empty()) continue;
    absl::InlinedVector<Departure, 1> departures;
    for (ParcelDraft& draft : all) departures.push_back(std::move(draft.departure));
    absl::Status left;
    try {
      left = tier_.PutOut(absl::MakeSpan(departures));
    } catch (const std::exception& error) {
      left = absl::UnavailableError(error.what());
    }
    if (!left.ok()) {
      PINION_LOG(kWarning) << "saved tensors stay on the device: " << left;
      for (const ParcelDraft& draft : all) Keep(draft.records, &OffloadStats::kept_copy_failed);
      continue;
    }
    {
      Released released;  // freed after the lock
      OffloadLock lock(state_);
      for (ParcelDraft& draft : all) Publish(draft, released);
    }
    if (!options_.overlap) EvictBlocking(all.front());
  }
  while (EvictSome() && state_.asks_for_device_bytes) {
  }
}

absl::InlinedVector<TensorDepartures::ParcelDraft, 1> TensorDepartures::PlanParcels(
    absl::Span<const RecordPtr> records, absl::Span<c10::Storage> sources) {
  const BoundStream stream = records.front()->pack_stream;
  absl::InlinedVector<size_t, 1> present;
  RecordPtrs changed;
  absl::InlinedVector<uint64_t, 1> sizes;
  for (size_t i = 0; i < records.size(); ++i) {
    if (!records[i]->HasItsMemory(sources[i])) {
      changed.push_back(records[i]);
      continue;
    }
    present.push_back(i);
    sizes.push_back(records[i]->size_bytes());
  }
  if (!changed.empty()) Keep(changed, &OffloadStats::kept_copy_failed);
  absl::InlinedVector<ParcelDraft, 1> all;
  PackingPlan plan = PlanPacking(sizes, link_);
  for (PackingPlan::Group& group : plan.groups) {
    ParcelDraft& draft = all.emplace_back();
    draft.offsets = std::move(group.offsets);
    for (const size_t piece : group.pieces) {
      draft.records.push_back(records[present[piece]]);
      draft.sources.push_back(std::move(sources[present[piece]]));
    }
    absl::StatusOr<std::shared_ptr<SavedParcel>> parcel = tier_.NewParcelIn<SavedParcel>(
        options_.backing.get(), group.size_bytes, stream.native, stream);
    if (!parcel.ok()) {
      // Lack of budget is counted in the statistics; other errors are logged.
      if (!absl::IsResourceExhausted(parcel.status())) {
        PINION_LOG(kWarning) << "saved tensors stay on the device: " << parcel.status();
      }
      Keep(draft.records, &OffloadStats::kept_no_host_memory);
      all.pop_back();
      continue;
    }
    Departure& departure = draft.departure;
    draft.parcel = *std::move(parcel);
    departure.parcel = draft.parcel;
    try {
      // The copy follows the pack stream, but the memory's reuse follows the stream that allocated
      // it.
      for (const c10::Storage& source : draft.sources) RecordOnStream(source, stream.torch);
      if (options_.verify) TakeChecksums(draft, stream);
      if ((group.gather || HoldsMuchMore(draft)) && FitsTarget(group.size_bytes)) {
        if (c10::Storage gathered = Gather(draft, stream)) {
          draft.parcel->gathered = true;
          draft.sources.clear();  // later work of the pack stream may reuse them
          departure.pieces = {{gathered.mutable_data(), 0, group.size_bytes}};
          departure.memory.push_back(TorchMemory(std::move(gathered)));
        }
      }
    } catch (const std::exception& error) {
      PINION_LOG(kWarning) << "saved tensors stay on the device: " << error.what();
      Keep(draft.records, &OffloadStats::kept_copy_failed);
      all.pop_back();
      continue;
    }
    for (size_t i = 0; i < draft.sources.size(); ++i) {
      const StorageRecord& record = *draft.records[i];
      departure.pieces.push_back({DataOf(record), draft.offsets[i], record.size_bytes()});
      departure.memory.push_back(TorchMemory(std::move(draft.sources[i])));
    }
  }
  return all;
}

bool TensorDepartures::HoldsMuchMore(const ParcelDraft& draft) {
  if (draft.records.front()->size_bytes() > LargestSmallPiece(link_)) return false;
  absl::flat_hash_set<const void*> storages;
  uint64_t held_bytes = 0;
  for (const RecordPtr& record : draft.records) {
    if (storages.insert(record->data).second) held_bytes += record->storage_bytes;
  }
  OffloadLock lock(state_);
  return held_bytes >= std::max(state_.schedule->BatchBytes(), 2 * draft.parcel->size_bytes);
}

bool TensorDepartures::FitsTarget(uint64_t size_bytes) const {
  if (!state_.asks_for_device_bytes) return true;
  return state_.DeviceBytes(device_) + AllocationBytes(size_bytes) <=
         *state_.planner->memory_bytes();
}

void TensorDepartures::TakeChecksums(const ParcelDraft& draft, const BoundStream& stream) {
  const c10::StreamGuard guard(stream.torch);
  for (size_t i = 0; i < draft.records.size(); ++i) {
    StorageRecord& record = *draft.records[i];
    record.checksum = TensorChecksum::Of(draft.sources[i], record.extent);
  }
}

c10::Storage TensorDepartures::Gather(const ParcelDraft& draft, const BoundStream& stream) {
  {
    MutexLock lock(gather_mu_);
    if (!gather_back_off_.MayTry()) return c10::Storage();
  }
  std::vector<GatherPiece> pieces;
  for (size_t i = 0; i < draft.records.size(); ++i) {
    const StorageRecord& record = *draft.records[i];
    pieces.push_back({DataOf(record), record.size_bytes(), draft.offsets[i]});
  }
  c10::Storage gathered;
  try {
    gathered = GatherOnDevice(stream, pieces, draft.parcel->size_bytes);
  } catch (const std::exception&) {
    // Most likely out of memory. gather_back_off_ avoids repeated failures, which are expensive.
  }
  MutexLock lock(gather_mu_);
  gathered ? gather_back_off_.Worked() : gather_back_off_.Refused();
  return gathered;
}

void TensorDepartures::Publish(ParcelDraft& draft, Released& released) {
  SavedParcel& parcel = *draft.parcel;
  absl::InlinedVector<HeldBytes, 1> held;
  int readers = 0;
  uint64_t record_bytes = 0;
  uint64_t not_freed = 0;
  for (size_t i = 0; i < draft.records.size(); ++i) {
    StorageRecord& record = *draft.records[i];
    record_bytes += record.size_bytes();
    if (record.live_handles == 0) {
      // Its last handle was destroyed during the submission.
      if (!parcel.gathered) AddByStream(parcel.TakeHeld(i), released.guarded);
      continue;
    }
    record.in_parcel = ParcelPart(draft.parcel, i, draft.offsets[i]);
    parcel.records.push_back(&record);
    parcel.objects.push_back(record.in_schedule.object);
    readers += record.live_handles;
    parcel.place = std::max(parcel.place, record.place());
    if (parcel.gathered) {
      if (record.leaving.source().use_count() > 1) ++not_freed;
      released.plain.push_back(record.leaving.TakeSource());
    } else {
      held.push_back({record.storage(), record.storage_bytes});
      record.leaving.TakeSource();  // not the last reference: the parcel has one
    }
  }
  parcel.AddReaders(readers);
  if (readers > 0) {
    if (parcel.gathered) held.push_back({&parcel, parcel.size_bytes});
    // Without overlap the caller evicts the parcel itself.
    state_.schedule->OnLeft(parcel, options_.overlap ? held : absl::Span<const HeldBytes>());
  } else if (parcel.gathered) {
    AddByStream(parcel.TakeHeld(0), released.guarded);
  }
  stats_.Update([&](OffloadStats& stats) {
    stats.evicted_not_freed += not_freed;
    if (draft.records.size() == 1) return;
    ++stats.groups;
    stats.grouped += draft.records.size();
    if (parcel.gathered) stats.offloaded_bytes += parcel.size_bytes - record_bytes;
  });
}

void TensorDepartures::EvictBlocking(const ParcelDraft& draft) {
  SavedParcel& parcel = *draft.parcel;
  {
    OffloadLock lock(state_);
    if (draft.records.front()->in_parcel.parcel() == nullptr) return;
  }
  if (kBlockingCopyOut.enabled()) {
    const absl::Status copied = parcel.copy_out().Wait(absl::InfiniteDuration());
    if (!copied.ok()) {
      PINION_LOG(kWarning) << "a saved tensor stays on the device: " << copied;
      return;
    }
  }
  GuardedMemories evicted;
  {
    OffloadLock lock(state_);
    evicted = Evict({&parcel});
  }
  for (GuardedMemory& memory : evicted) memory.Disarm();  // the host has waited
}

// --------------------------------------------------------------------------------------- evict

GuardedMemories TensorDepartures::Evict(absl::Span<ScheduledParcel* const> parcels) {
  GuardedMemories evicted;
  GuardedMemories dropped;  // fetched memory, guarded by copies of the other direction
  uint64_t bytes = 0, not_freed = 0, unread = 0;
  for (ScheduledParcel* scheduled : parcels) {
    auto& parcel = static_cast<SavedParcel&>(*scheduled);
    bytes += RecordBytes(parcel);
    const uint64_t before = not_freed;
    AddByStream(parcel.Evict(&not_freed), evicted);
    state_.NoteHeld(parcel, not_freed > before);
    GuardedMemory fetched = parcel.TakeFetched();
    // Also if another thread is fetching it: otherwise the schedule would return the parcel again
    // and again until that fetch is done.
    const bool was_unread = state_.schedule->OnDropped(parcel);
    if (!fetched) continue;
    unread += was_unread ? 1 : 0;
    dropped.push_back(std::move(fetched));
  }
  stats_.Update([&](OffloadStats& stats) {
    stats.evicted_bytes += bytes;
    stats.evicted_not_freed += not_freed;
    stats.prefetches_dropped += unread;
  });
  std::move(dropped.begin(), dropped.end(), std::back_inserter(evicted));
  return evicted;
}

bool TensorDepartures::TakeExcess(Excess& excess) {
  const ScheduledParcels parcels = state_.schedule->TakeEvictions();
  for (const ScheduledParcel* parcel : parcels) excess.bytes += parcel->size_bytes;
  if (!parcels.empty()) excess.memories = Evict(parcels);
  state_.TellShare();  // after both, which find memory that should have been freed
  return !parcels.empty();
}

void TensorDepartures::Drop(Excess& excess) {
  if (excess.memories.empty()) return;
  const ScopedRange range(options_.engine.trace.get(), "pinion.evict", excess.bytes);
  excess.memories.clear();
}

bool TensorDepartures::EvictSome() {
  Excess excess;
  const uint64_t device_bytes = state_.DeviceBytes(device_);
  {
    OffloadLock lock(state_);
    state_.TellDeviceBytes(device_bytes);
    if (!TakeExcess(excess)) return false;
  }
  Drop(excess);
  return true;
}

void TensorDepartures::EvictAll() {
  GuardedMemories evicted;  // freed after the lock
  OffloadLock lock(state_);
  evicted = Evict(state_.schedule->TakeAllEvictions());
}

void DueRecords::Sort(OffloadState& state) {
  // Both inputs and dropout masks are leaves. When their operator has returned, only the program
  // still references inputs, whose copy would free nothing.
  const auto held = std::stable_partition(records.begin(), records.end(),
                                          [](const RecordPtr& record)
                                              ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock) {
                                                return !record->leaving.IsKeptByHolder();
                                              });
  // One batch per pack stream, because its copies wait for that stream's present work.
  for (auto begin = records.begin(); begin != held;) {
    const c10::Stream stream = (*begin)->pack_stream.torch;
    const uint64_t batch_key = state.schedule->BatchKey((*begin)->in_schedule.object);
    begin = std::stable_partition(
        begin, held,
        [&](const RecordPtr& record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state.mu, kRecordsLock) {
          return record->pack_stream.torch == stream &&
                 state.schedule->BatchKey(record->in_schedule.object) == batch_key;
        });
    ends.push_back(begin - records.begin());
  }
  for (auto one = records.begin(); one != held; ++one) {
    sources.push_back((*one)->leaving.source());
  }
}

}  // namespace pinion
