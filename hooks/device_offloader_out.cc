// How saved tensors leave the device.

#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/time/time.h"
#include "pinion/allocator/base/check.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/engine/host_buffer.h"
#include "pinion/engine/plan/pack_plan.h"
#include "pinion/hooks/device_offloader.h"
#include "pinion/hooks/device_offloader_handle.h"
#include "pinion/hooks/gather.h"

namespace pinion {

// A parcel in the making.
struct DeviceOffloader::Leaving {
  std::vector<RecordPtr> records;
  std::vector<uint64_t> offsets;  // of each in the parcel
  // Of each: keeps the device memory alive while mu_ is not held, whatever becomes of the handles.
  std::vector<c10::Storage> sources;
  ParcelPtr parcel;
  c10::Storage gathered;  // the parcel's bytes on the device, if they were gathered

  // Read only; mutable_data() would make a lazily cloned storage copy itself.
  char* DataOf(size_t i) const {
    return static_cast<char*>(const_cast<void*>(records[i]->data)) + records[i]->extent.begin_bytes;
  }

  void AddTo(CopyBatch& batch) const {
    if (gathered) {
      batch.Add(parcel->host, 0, gathered.mutable_data(), parcel->size_bytes());
      return;
    }
    for (size_t i = 0; i < records.size(); ++i) {
      batch.Add(parcel->host, offsets[i], DataOf(i), records[i]->size_bytes());
    }
  }

  // The copy may run all the same: what it reads must not become another tensor's.
  void Leak() {
    if (gathered) {
      gathered.unsafeReleaseStorageImpl();
      return;
    }
    for (c10::Storage& source : sources) source.unsafeReleaseStorageImpl();
  }
};

void DeviceOffloader::KeepOnDevice(const std::vector<RecordPtr>& records,
                                   uint64_t OffloadStats::*reason) {
  uint64_t bytes = 0;
  for (const RecordPtr& record : records) bytes += record->size_bytes();
  stats_->Update([&](OffloadStats& stats) {
    stats.*reason += records.size();
    stats.offloaded -= records.size();
    stats.offloaded_bytes -= bytes;
  });
}

void DeviceOffloader::AwaitOperator(const RecordPtr& record, const NodeId& node) {
  if (record->state == StorageRecord::CopyOut::kPending) {
    RemovePending(*record);
    record->state = StorageRecord::CopyOut::kInUse;
    scopes_.at(record->scope).in_use.push_back(record);
  }
  record->nodes.push_back(node);
}

void DeviceOffloader::EndOperator(OpenScope& scope, RecordPtr record) {
  record->state = StorageRecord::CopyOut::kPending;
  const bool small = IsSmall(*record);
  (small ? scope.small_bytes : scope.large_bytes) += record->pending_bytes;
  (small ? scope.small : scope.large).push_back(std::move(record));
}

void DeviceOffloader::RemovePending(const StorageRecord& record) {
  OpenScope& scope = scopes_.at(record.scope);
  const auto is_record = [&](const RecordPtr& pending) { return pending.get() == &record; };
  if (record.state == StorageRecord::CopyOut::kInUse) {
    std::erase_if(scope.in_use, is_record);
    return;
  }
  const bool small = IsSmall(record);
  std::erase_if(small ? scope.small : scope.large, is_record);
  (small ? scope.small_bytes : scope.large_bytes) -= record.pending_bytes;
}

std::vector<DeviceOffloader::RecordPtr> DeviceOffloader::TakeDue(OpenScope& scope, bool ends) {
  const bool all = ends || !options_.overlap || scope.small_bytes >= BatchBytes();
  std::vector<RecordPtr> due;
  if (all || scope.large_bytes >= BatchBytes()) {
    due = std::exchange(scope.large, {});
    scope.large_bytes = 0;
  }
  if (all) {
    const std::vector<RecordPtr> small = std::exchange(scope.small, {});
    scope.small_bytes = 0;
    due.insert(due.end(), small.begin(), small.end());
  }
  // In the order of packing, which is the order in which they are evicted.
  std::sort(due.begin(), due.end(),
            [](const RecordPtr& a, const RecordPtr& b) { return a->sequence < b->sequence; });
  for (const RecordPtr& record : due) record->state = StorageRecord::CopyOut::kDecided;
  return due;
}

void DeviceOffloader::CopyOut(std::vector<RecordPtr> due) {
  std::vector<RecordPtr> leaving;
  {
    MutexLock lock(mu_);
    std::vector<RecordPtr> held;
    for (const RecordPtr& record : due) {
      // Inputs are leaves and so are dropout masks. By now the operator that made a mask has let
      // go of it, while an input is still held: only the former's copy would free anything.
      const bool stays = record->maybe_held && record->source.use_count() > 1;
      (stays ? held : leaving).push_back(record);
    }
    KeepOnDevice(held, &OffloadStats::kept_held);
  }
  if (!options_.overlap) {
    for (const RecordPtr& record : leaving) CopyOutBlocking(record);
    return;
  }
  // One batch per pack stream: its copies start after that stream's present work.
  while (!leaving.empty()) {
    const BoundStream stream = leaving.front()->pack_stream;
    const auto rest = std::stable_partition(
        leaving.begin(), leaving.end(),
        [&](const RecordPtr& record) { return record->pack_stream.torch == stream.torch; });
    SubmitCopyOut(stream, {leaving.begin(), rest});
    leaving.erase(leaving.begin(), rest);
  }
}

void DeviceOffloader::SubmitCopyOut(const BoundStream& stream,
                                    const std::vector<RecordPtr>& records) {
  // A gather or a checksum on a stream that captures would become part of the graph.
  const absl::StatusOr<bool> capturing = engine_->IsCapturing(stream.native);
  if (!capturing.ok() || *capturing) {
    MutexLock lock(mu_);
    KeepOnDevice(records,
                 capturing.ok() ? &OffloadStats::kept_capturing : &OffloadStats::kept_copy_failed);
    return;
  }
  std::vector<Leaving> all = PlanParcels(stream, records);
  if (all.empty()) return;
  absl::StatusOr<Transfer> copy;
  try {
    CopyBatch batch(CopyDirection::kDeviceToHost);
    for (const Leaving& leaving : all) leaving.AddTo(batch);
    // Not retried: the tensors are on the device and may simply stay there.
    copy = engine_->Submit(std::move(batch), stream.native);
  } catch (const std::exception& error) {
    copy = absl::UnavailableError(error.what());
  }
  if (!copy.ok()) {
    PINION_LOG(kWarning) << "saved tensors stay on the device: " << copy.status();
  }

  const bool poisoned = IsPoisoned();
  Released released;
  MutexLock lock(mu_);
  for (Leaving& leaving : all) {
    if (copy.ok()) {
      Publish(leaving, *copy, released);
    } else {
      if (poisoned) leaving.Leak();
      KeepOnDevice(leaving.records, &OffloadStats::kept_copy_failed);
    }
  }
}

// Those that can leave, each with its place in host memory, gathered where that was planned and
// possible.
std::vector<DeviceOffloader::Leaving> DeviceOffloader::PlanParcels(
    const BoundStream& stream, const std::vector<RecordPtr>& records) {
  std::vector<RecordPtr> present;
  std::vector<c10::Storage> sources;
  std::vector<uint64_t> sizes;
  {
    MutexLock lock(mu_);
    for (const RecordPtr& record : records) {
      if (!record->source) continue;  // its last handle went meanwhile
      if (!record->HasItsMemory(record->source)) {
        KeepOnDevice({record}, &OffloadStats::kept_copy_failed);
        continue;
      }
      present.push_back(record);
      sources.push_back(record->source);
      sizes.push_back(record->size_bytes());
    }
  }
  std::vector<Leaving> all;
  for (const PackPlan::Group& group : PlanPacking(sizes, link_).groups) {
    Leaving leaving;
    leaving.offsets = group.offsets;
    for (const size_t piece : group.pieces) {
      leaving.records.push_back(present[piece]);
      leaving.sources.push_back(sources[piece]);
    }
    absl::StatusOr<PinnedBlock> block = allocator_->Allocate(group.size_bytes);
    if (!block.ok()) {
      MutexLock lock(mu_);
      KeepOnDevice(leaving.records, &OffloadStats::kept_no_host_memory);
      continue;
    }
    leaving.parcel =
        std::make_shared<Parcel>(stream, std::make_shared<HostBuffer>(*std::move(block)));
    try {
      // The copy is ordered with the pack stream, the memory's reuse with the stream that it was
      // allocated on.
      for (const c10::Storage& source : leaving.sources) RecordOnStream(source, stream.torch);
      if (options_.verify) TakeChecksums(leaving);
      if (group.gather || HoldsMuchMore(leaving)) leaving.gathered = Gather(leaving);
    } catch (const std::exception& error) {
      PINION_LOG(kWarning) << "saved tensors stay on the device: " << error.what();
      MutexLock lock(mu_);
      KeepOnDevice(leaving.records, &OffloadStats::kept_copy_failed);
      continue;
    }
    all.push_back(std::move(leaving));
  }
  return all;
}

bool DeviceOffloader::HoldsMuchMore(const Leaving& leaving) {
  if (!IsSmall(*leaving.records.front())) return false;
  absl::flat_hash_set<const void*> storages;
  uint64_t held_bytes = 0;
  for (const RecordPtr& record : leaving.records) {
    if (storages.insert(record->data).second) held_bytes += record->storage_bytes;
  }
  MutexLock lock(mu_);
  return held_bytes >= std::max(BatchBytes(), 2 * leaving.parcel->size_bytes());
}

void DeviceOffloader::TakeChecksums(const Leaving& leaving) {
  const c10::StreamGuard guard(leaving.parcel->pack_stream.torch);
  for (size_t i = 0; i < leaving.records.size(); ++i) {
    StorageRecord& record = *leaving.records[i];
    record.checksum = TensorChecksum::Of(leaving.sources[i], record.extent);
  }
}

// Empty if that is not possible now: the pieces can be copied one by one.
c10::Storage DeviceOffloader::Gather(const Leaving& leaving) {
  const BoundStream& stream = leaving.parcel->pack_stream;
  {
    MutexLock lock(mu_);
    if (!gather_back_off_.MayTry()) return c10::Storage();
  }
  std::vector<GatherPiece> pieces;
  for (size_t i = 0; i < leaving.records.size(); ++i) {
    pieces.push_back({leaving.DataOf(i), leaving.records[i]->size_bytes(), leaving.offsets[i]});
  }
  c10::Storage gathered;
  try {
    gathered = GatherOnDevice(stream, pieces, leaving.parcel->size_bytes());
  } catch (const std::exception&) {
    // Out of memory, most likely, which is expensive to find out.
  }
  MutexLock lock(mu_);
  gathered ? gather_back_off_.Worked() : gather_back_off_.Refused();
  return gathered;
}

// The copy was submitted.
void DeviceOffloader::Publish(Leaving& leaving, const Transfer& copy, Released& released) {
  Parcel& parcel = *leaving.parcel;
  parcel.copy_out = copy;
  parcel.gathered = std::move(leaving.gathered);
  uint64_t record_bytes = 0;
  uint64_t not_freed = 0;
  GuardedStorage ours(parcel.pack_stream, copy, WaitSite::kFreeAfterCopy);
  for (size_t i = 0; i < leaving.records.size(); ++i) {
    StorageRecord& record = *leaving.records[i];
    record_bytes += record.size_bytes();
    if (record.live_handles == 0) {
      // Its last handle went while the copy was submitted: its source is ours to guard.
      ours.Add(std::move(leaving.sources[i]));
      continue;
    }
    record.parcel = leaving.parcel;
    record.parcel_offset = leaving.offsets[i];
    parcel.records.push_back(&record);
    parcel.live_handles += record.live_handles;
    if (record.sequence > parcel.sequence) {
      parcel.sequence = record.sequence;
      parcel.scope = record.scope;
    }
    if (parcel.gathered) {
      // The pack stream has read it, in its order: no copy touches it.
      leaving.sources[i] = c10::Storage();
      if (record.source.use_count() > 1) ++not_freed;
      released.plain.push_back(std::exchange(record.source, c10::Storage()));
    }
  }
  if (parcel.live_handles > 0) {
    order_.emplace(parcel.OrderKey(), &parcel);
    if (options_.overlap) EnterWindow(parcel);
  } else if (parcel.gathered) {
    ours.Add(std::exchange(parcel.gathered, c10::Storage()));
  }
  released.storages.push_back(std::move(ours));
  stats_->Update([&](OffloadStats& stats) {
    stats.evicted_not_freed += not_freed;
    if (leaving.records.size() == 1) return;
    ++stats.groups;
    stats.grouped += leaving.records.size();
    if (parcel.gathered) stats.offloaded_bytes += parcel.size_bytes() - record_bytes;
  });
}

// The baseline without overlap: the host waits, then the device memory goes.
void DeviceOffloader::CopyOutBlocking(const RecordPtr& record) {
  SubmitCopyOut(record->pack_stream, {record});
  ParcelPtr parcel;
  Transfer copy_out;
  {
    MutexLock lock(mu_);
    parcel = record->parcel;
    if (parcel == nullptr) return;
    copy_out = parcel->copy_out;
  }
  if (WaitSiteEnabled(WaitSite::kBlockingCopyOut)) {
    const absl::Status copied = copy_out.Wait(absl::InfiniteDuration());
    if (!copied.ok()) {
      PINION_LOG(kWarning) << "a saved tensor stays on the device: " << copied;
      return;
    }
  }
  GuardedStorage evicted;
  {
    MutexLock lock(mu_);
    evicted = Evict(*parcel);
  }
  evicted.Disarm();  // the host has waited
}

}  // namespace pinion
