// How saved tensors come back. Which ones leave is in device_offloader.cc, how they leave in
// device_offloader_out.cc.

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <thread>
#include <utility>

#include "absl/time/time.h"
#include "pinion/device/allocation_label.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/hooks/device_offloader.h"
#include "pinion/hooks/device_offloader_handle.h"
#include "pinion/hooks/lent_tensors.h"

namespace pinion {
namespace {

// Not all of what its records need is on the device.
bool IsAway(const Parcel& parcel) {
  if (parcel.gathered) return false;
  return std::any_of(parcel.records.begin(), parcel.records.end(),
                     [](const auto* record) { return record->identity.expired(); });
}

}  // namespace

// -------------------------------------------------------------------------------------- unpack

at::Tensor DeviceOffloader::Unpack(Handle& handle) {
  const ScopedRange range(trace(), "pinion.unpack", handle.record()->size_bytes());
  NoteBackward();
  Bytes bytes = Acquire(handle, BoundStream(CurrentStream(device_)));
  stats_->Update([](OffloadStats& stats) { ++stats.unpacked; });
  Prefetch(*handle.record());
  // The engine may have a tensor over memory that nobody else needs for its own, and change it.
  // Not the memory that was saved, whoever lets go of it: other handles find it as long as it
  // lives.
  if (bytes.fetched && CurrentBackward() != -1 && !BackwardKeepsGraph()) {
    SettleLoans();
    if (bytes.storage.use_count() == 1) {
      return handle.View(std::move(bytes), c10::VariableVersion(/*version=*/0));
    }
  }
  // A node that changes any other in place is found out by whoever shares it, as without offload.
  return Lend(handle.View(std::move(bytes), handle.record()->version.counter()));
}

DeviceOffloader::Bytes DeviceOffloader::Acquire(Handle& handle, const BoundStream& stream) {
  StorageRecord& record = *handle.record();
  for (;;) {
    GuardedStorage fetched;  // these are let go of after mu_
    Released released;
    Bytes bytes;
    ParcelPtr parcel;
    {
      MutexLock lock(mu_);
      parcel = record.parcel;
      while (parcel != nullptr && parcel->fetching) fetched_.Wait(mu_);
      bytes = BytesOnDevice(record, released);
      if (!bytes.storage && parcel != nullptr) {
        if (parcel->fetched) {
          bytes = {parcel->fetched.storage(), record.ShiftIntoParcel(), /*fetched=*/true};
          fetched = GuardedStorage(bytes.storage, parcel->fetched.stream(), parcel->fetched.copy(),
                                   WaitSite::kFreeAfterCopy);
          if (std::exchange(parcel->fetched_ahead, false)) {
            prefetched_bytes_ -= parcel->ahead_bytes;
            stats_->Update([](OffloadStats& stats) { ++stats.prefetch_hits; });
          }
        } else {
          parcel->fetching = true;
        }
      }
      if (bytes.storage) MarkRead(handle, released);
    }
    TORCH_CHECK(bytes.storage || parcel != nullptr,
                "the storage of a tensor that is needed for gradient computation was resized or "
                "given other memory after the tensor was saved");
    if (bytes.storage && !bytes.fetched) {
      stats_->Update([](OffloadStats& stats) { ++stats.reused_on_device; });
      if (stream.torch != record.pack_stream.torch) {
        ThrowIfError(engine_->OrderStreams(record.pack_stream.native, stream.native,
                                           WaitSite::kUnpackOnOtherStream),
                     "ordering backward's stream after forward's");
        RecordOnStream(bytes.storage, stream.torch);
      }
      return bytes;
    }
    if (bytes.storage) {
      WaitForCopyIn(fetched.copy(), stream);
      // The reader's stream has waited, and the framework orders the free after the reader.
      if (stream.torch != fetched.stream().torch) RecordOnStream(bytes.storage, stream.torch);
      fetched.Disarm();
      for (GuardedStorage& read : released.storages) read.Disarm();
      if (record.checksum) Verify(handle, bytes, fetched.copy());
      return bytes;
    }
    FetchNow(*parcel, stream);
  }
}

// One copy brings many tensors back, and a later copy is done after an earlier one. What a thread
// has seen a stream wait for is remembered only within one backward: later, another stream may have
// its handle.
void DeviceOffloader::WaitForCopyIn(const Transfer& copy, const BoundStream& stream) {
  const LastWait wait = {std::this_thread::get_id(), CurrentBackward(), stream.torch,
                         copy.ticket().value};
  if (wait.backward != -1) {
    MutexLock lock(mu_);
    if (last_wait_.has_value() && last_wait_->thread == wait.thread &&
        last_wait_->backward == wait.backward && last_wait_->stream == wait.stream &&
        last_wait_->number >= wait.number) {
      return;
    }
  }
  ThrowIfError(copy.WaitOn(stream.native, WaitSite::kUnpackAfterCopyIn),
               "waiting for a saved tensor");
  MutexLock lock(mu_);
  last_wait_ = wait;
}

void DeviceOffloader::Verify(const Handle& handle, const Bytes& bytes, const Transfer& copy_in) {
  const StorageRecord& record = *handle.record();
  const uint64_t begin_bytes = record.extent.begin_bytes + bytes.shift_bytes;
  const uint64_t saved = record.checksum.value();
  const uint64_t found =
      TensorChecksum::Of(bytes.storage, {begin_bytes, begin_bytes + record.size_bytes()}).value();
  if (found == saved) {
    stats_->Update([](OffloadStats& stats) { ++stats.verified; });
    return;
  }
  Transfer copy_out;
  {
    MutexLock lock(mu_);
    copy_out = record.parcel->copy_out;
  }
  TORCH_CHECK(false,
              "Pinion, in verify mode: a saved tensor has come back changed: ", handle.Describe(),
              ", its ", record.size_bytes(), " bytes copied out by D2H ", copy_out.ticket().value,
              " of ", device_, " and back by H2D ", copy_in.ticket().value, "; their checksum was ",
              saved, " and is ", found);
}

DeviceOffloader::Bytes DeviceOffloader::BytesOnDevice(StorageRecord& record, Released& released) {
  if (record.parcel != nullptr && record.parcel->gathered) {
    return {record.parcel->gathered, record.ShiftIntoParcel()};
  }
  c10::Storage storage = record.source;
  if (!storage) {
    if (auto impl = record.identity.lock()) storage = c10::Storage(std::move(impl));
  }
  if (!storage) return {};
  if (!record.HasItsMemory(storage)) {
    released.plain.push_back(std::move(storage));  // this may be the last owner by now
    return {};
  }
  return {std::move(storage), /*shift_bytes=*/0};
}

void DeviceOffloader::MarkRead(Handle& handle, Released& released) {
  if (handle.record()->parcel == nullptr) return;
  Parcel& parcel = *handle.record()->parcel;
  if (handle.read_epoch == parcel.epoch) return;
  handle.read_epoch = parcel.epoch;
  ++parcel.read_handles;
  if (parcel.read_handles == parcel.live_handles) {
    released.storages.push_back(TakeFetched(parcel));
  }
}

GuardedStorage DeviceOffloader::TakeFetched(Parcel& parcel) {
  if (std::exchange(parcel.fetched_ahead, false)) {
    prefetched_bytes_ -= parcel.ahead_bytes;
    stats_->Update([](OffloadStats& stats) { ++stats.prefetches_dropped; });
  }
  ++parcel.epoch;
  parcel.read_handles = 0;
  return std::move(parcel.fetched);
}

void DeviceOffloader::FetchNow(Parcel& parcel, const BoundStream& stream) {
  const ScopedRange range(trace(), "pinion.fetch", parcel.size_bytes());
  GuardedStorage fetched;
  try {
    const AllocationLabel label("saved tensors fetched by Pinion");
    c10::Storage storage;
    try {
      storage = AllocateStorage(stream.torch, parcel.size_bytes());
    } catch (const c10::OutOfMemoryError&) {
      FreeUnneeded();
      storage = AllocateStorage(stream.torch, parcel.size_bytes());
    }
    // Backward needs it now, and what is in flight before it the prefetch window bounds.
    CopyBatch batch(CopyDirection::kHostToDevice, FlowControl::kCaller);
    batch.Add(parcel.host, 0, storage.mutable_data(), parcel.size_bytes());
    const absl::StatusOr<Transfer> copy = engine_->Submit(std::move(batch), stream.native);
    if (!copy.ok()) {
      if (IsPoisoned()) storage.unsafeReleaseStorageImpl();
      ThrowIfError(copy.status(),
                   IsInHostMemory(parcel)
                       ? "fetching a saved tensor (its bytes are safe in host memory)"
                       : "fetching a saved tensor");
    }
    fetched = GuardedStorage(std::move(storage), stream, *copy, WaitSite::kFreeAfterCopy);
    if (!options_.overlap) {
      ThrowIfError(copy->Wait(absl::InfiniteDuration()), "waiting for a saved tensor");
    }
  } catch (...) {
    MutexLock lock(mu_);
    parcel.fetching = false;
    fetched_.NotifyAll();
    throw;
  }
  stats_->Update([&](OffloadStats& stats) {
    ++stats.fetched_on_demand;
    stats.fetched_bytes += parcel.size_bytes();
  });
  const int64_t backward = CurrentBackward();
  MutexLock lock(mu_);
  EndFetch(parcel, std::move(fetched), backward);
  fetched_.NotifyAll();
}

// `fetched` was empty before: nothing is let go of under mu_.
void DeviceOffloader::EndFetch(Parcel& parcel, GuardedStorage fetched, int64_t backward) {
  parcel.fetching = false;
  parcel.fetched_in = backward;
  parcel.fetched = std::move(fetched);
}

bool DeviceOffloader::IsInHostMemory(const Parcel& parcel) {
  Transfer copy_out;
  {
    MutexLock lock(mu_);
    copy_out = parcel.copy_out;
  }
  return copy_out.IsDone();
}

// ------------------------------------------------------------------------------------ prefetch

void DeviceOffloader::Prefetch(const StorageRecord& from) {
  if (!options_.overlap) return;
  const int64_t backward = CurrentBackward();
  for (;;) {
    std::vector<ParcelPtr> claimed;
    {
      MutexLock lock(mu_);
      if (!prefetch_back_off_.MayTry()) return;
      claimed = ClaimForPrefetch(from, backward);
    }
    if (claimed.empty() || !FetchAhead(claimed, backward)) return;
  }
}

std::vector<DeviceOffloader::ParcelPtr> DeviceOffloader::ClaimForPrefetch(const StorageRecord& from,
                                                                          int64_t backward) {
  std::vector<ParcelPtr> claimed;
  const uint64_t limit = Window(options_.prefetch_window_bytes);
  const uint64_t batch_limit = BatchBytes();
  uint64_t batch_bytes = 0;
  uint64_t looks = 0;
  PrefetchCursor& cursor = backwards_[backward];
  // What was saved early may be read in between, by all nodes even (an attention mask): then those
  // before it are looked at next, and later those before the next node's. What lies before is
  // passed over where that comes down to it again.
  PrefetchCursor before;
  if (cursor.scope != from.scope || from.sequence < cursor.oldest ||
      from.sequence > cursor.newest) {
    before = std::exchange(cursor, {from.scope, from.sequence, from.sequence});
  }
  for (auto it = order_.lower_bound({from.scope, cursor.oldest}); it != order_.begin();) {
    Parcel& parcel = *(--it)->second;
    // Another scope is another graph, whose backward may be far away.
    if (parcel.scope != from.scope) break;
    ++looks;
    if (before.scope == from.scope && parcel.sequence < before.newest &&
        parcel.sequence >= before.oldest) {
      cursor.oldest = before.oldest;
      it = order_.lower_bound({from.scope, before.oldest});
      continue;
    }
    // A node reads what it saved in its own order, so what lies before may have been read already,
    // by handles that go when the node is done.
    const bool had = backward != -1 && parcel.fetched_in == backward;
    if (had || parcel.fetched || parcel.fetching || !IsAway(parcel)) {
      cursor.oldest = parcel.sequence;
      continue;
    }
    if (!claimed.empty() && (parcel.pack_stream.torch != claimed.front()->pack_stream.torch ||
                             batch_bytes + parcel.size_bytes() > batch_limit)) {
      break;
    }
    const uint64_t share = ShareOfWindow(options_.prefetch_window_bytes, parcel.size_bytes());
    if (prefetched_bytes_ > 0 && prefetched_bytes_ + share > limit) break;
    parcel.fetching = true;
    parcel.fetched_ahead = true;
    parcel.ahead_bytes = share;
    prefetched_bytes_ += share;
    batch_bytes += parcel.size_bytes();
    claimed.push_back(parcel.shared_from_this());
    cursor.oldest = parcel.sequence;
  }
  if (looks > 0) stats_->Update([looks](OffloadStats& stats) { stats.prefetch_looks += looks; });
  return claimed;
}

// False when that failed: backward goes on without more prefetches for now. Whatever is wrong with
// the device is for a fetch that is needed to report.
bool DeviceOffloader::FetchAhead(const std::vector<ParcelPtr>& parcels, int64_t backward) {
  uint64_t wanted_bytes = 0;
  for (const ParcelPtr& parcel : parcels) wanted_bytes += parcel->size_bytes();
  const ScopedRange range(trace(), "pinion.prefetch", wanted_bytes);
  const BoundStream stream = parcels.front()->pack_stream;
  std::vector<c10::Storage> storages(parcels.size());
  absl::StatusOr<Transfer> copy;  // an error until the copy is submitted
  // The prefetch window is the bound: the host never waits for a prefetch.
  CopyBatch batch(CopyDirection::kHostToDevice, FlowControl::kCaller);
  try {
    const AllocationLabel label("saved tensors fetched by Pinion");
    for (size_t i = 0; i < parcels.size(); ++i) {
      storages[i] = AllocateStorage(stream.torch, parcels[i]->size_bytes());
      batch.Add(parcels[i]->host, 0, storages[i].mutable_data(), parcels[i]->size_bytes());
    }
    copy = engine_->Submit(std::move(batch), stream.native);
  } catch (const std::exception&) {
    // Out of memory, most likely.
  }

  const bool poisoned = IsPoisoned();
  Released released;
  uint64_t bytes = 0;
  {
    MutexLock lock(mu_);
    for (size_t i = 0; i < parcels.size(); ++i) {
      Parcel& parcel = *parcels[i];
      if (copy.ok()) {
        EndFetch(parcel,
                 GuardedStorage(std::move(storages[i]), stream, *copy, WaitSite::kFreeAfterCopy),
                 backward);
        bytes += parcel.size_bytes();
        // The last handle went while the copy was submitted.
        if (parcel.live_handles == 0) released.storages.push_back(TakeFetched(parcel));
      } else {
        parcel.fetching = false;
        parcel.fetched_ahead = false;
        prefetched_bytes_ -= parcel.ahead_bytes;
        if (poisoned) storages[i].unsafeReleaseStorageImpl();
      }
    }
    // An allocation that fails is expensive: LibTorch's allocator for CUDA gives its cache back.
    if (copy.ok()) {
      prefetch_back_off_.Worked();
    } else {
      prefetch_back_off_.Refused();
      ResetCursors();
    }
    fetched_.NotifyAll();
  }
  stats_->Update([&](OffloadStats& stats) {
    stats.fetched_bytes += bytes;
    if (!copy.ok()) stats.prefetches_refused += parcels.size();
  });
  return copy.ok();
}

void DeviceOffloader::ResetCursors() {
  for (auto& [backward, cursor] : backwards_) cursor = PrefetchCursor();
}

void DeviceOffloader::FreeUnneeded() {
  SettleLoans();
  Released released;
  MutexLock lock(mu_);
  ResetCursors();
  for (const auto& [key, parcel] : order_) {
    if (!parcel->fetched_ahead || !parcel->fetched) continue;
    parcel->fetched_in = -1;  // it may be fetched ahead once more
    released.storages.push_back(TakeFetched(*parcel));
  }
  TakeLate(released);
}

void DeviceOffloader::NoteBackward() {
  const int64_t backward = CurrentBackward();
  if (backward == -1) return;
  {
    MutexLock lock(mu_);
    if (!backwards_.try_emplace(backward).second) return;
    prefetch_back_off_ = BackOff();
  }
  AtEndOfBackward([self = shared_from_this(), backward] { self->EndBackward(backward); });
}

void DeviceOffloader::EndBackward(int64_t backward) {
  Released released;
  MutexLock lock(mu_);
  backwards_.erase(backward);
  for (const auto& [key, parcel] : order_) {
    if (parcel->fetched && parcel->fetched_in == backward) {
      released.storages.push_back(TakeFetched(*parcel));
    }
  }
  TakeLate(released);
}

}  // namespace pinion
