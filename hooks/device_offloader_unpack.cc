// How saved tensors come back: the other half is in device_offloader.cc.

#include <c10/util/Exception.h>

#include <exception>
#include <utility>

#include "absl/time/time.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/device/allocation_label.h"
#include "pinion/hooks/device_offloader.h"
#include "pinion/hooks/device_offloader_handle.h"

namespace pinion {
namespace {

constexpr int kTransientRetries = 3;

template <typename Enqueue>
auto RetryTransient(Enqueue enqueue) {
  auto result = enqueue();
  for (int attempt = 1; attempt < kTransientRetries && absl::IsUnavailable(StatusOf(result));
       ++attempt) {
    result = enqueue();
  }
  return result;
}

}  // namespace

// -------------------------------------------------------------------------------------- unpack

at::Tensor DeviceOffloader::Unpack(Handle& handle) {
  NoteBackward();
  Bytes bytes = Acquire(handle, BoundStream(CurrentStream(device_)));
  stats_->Update([](OffloadStats& stats) { ++stats.unpacked; });
  Prefetch(*handle.record());
  return handle.View(std::move(bytes));
}

DeviceOffloader::Bytes DeviceOffloader::Acquire(Handle& handle, const BoundStream& stream) {
  StorageRecord& record = *handle.record();
  for (;;) {
    GuardedStorage changed;  // both are let go of after mu_
    GuardedStorage fetched;
    Released released;
    Bytes bytes;
    bool alive = false;
    bool lost = false;
    {
      MutexLock lock(mu_);
      while (record.fetching) fetched_.Wait(mu_);
      bytes.storage = record.source;
      if (!bytes.storage) {
        if (auto impl = record.identity.lock()) bytes.storage = c10::Storage(std::move(impl));
      }
      alive = bytes.storage && record.HasItsMemory(bytes.storage);
      if (alive) {
        // A backward that changes it in place is found out by whoever shares it, as without
        // offload.
        bytes.version = record.version.counter();
      } else {
        lost = record.state != StorageRecord::CopyOut::kSubmitted;
        bytes.storage = c10::Storage();
        // What a reader has changed is the reader's: the saved bytes are in host memory.
        if (record.fetched && record.fetched_version.current_version() != 0) {
          changed = TakeFetched(record);
        }
      }
      if (!alive && record.fetched) {
        bytes = {record.fetched.storage(), record.extent.begin_bytes, record.fetched_version};
        fetched = GuardedStorage(bytes.storage, record.fetched.stream(), record.fetched.copy(),
                                 WaitSite::kFreeAfterCopy);
        if (std::exchange(record.fetched_ahead, false)) {
          prefetched_bytes_ -= record.size_bytes();
          stats_->Update([](OffloadStats& stats) { ++stats.prefetch_hits; });
        }
      }
      if (bytes.storage) {
        MarkRead(handle, released);
      } else if (!lost) {
        record.fetching = true;
      }
    }
    TORCH_CHECK(!lost,
                "the storage of a tensor that is needed for gradient computation was resized or "
                "given other memory after the tensor was saved");
    if (alive) {
      stats_->Update([](OffloadStats& stats) { ++stats.reused_on_device; });
      if (stream.torch != record.pack_stream.torch) {
        ThrowIfError(RetryTransient([&] {
                       return engine_->OrderStreams(record.pack_stream.native, stream.native,
                                                    WaitSite::kUnpackOnOtherStream);
                     }),
                     "ordering backward's stream after forward's");
        RecordOnStream(bytes.storage, stream.torch);
      }
      return bytes;
    }
    if (bytes.storage) {
      ThrowIfError(RetryTransient([&] {
                     return fetched.copy().WaitOn(stream.native, WaitSite::kUnpackAfterCopyIn);
                   }),
                   "waiting for a saved tensor");
      // The reader's stream has waited, and the framework orders the free after the reader.
      if (stream.torch != fetched.stream().torch) RecordOnStream(bytes.storage, stream.torch);
      fetched.Disarm();
      for (GuardedStorage& read : released.storages) read.Disarm();
      return bytes;
    }
    FetchNow(record, stream);
  }
}

void DeviceOffloader::MarkRead(Handle& handle, Released& released) {
  StorageRecord& record = *handle.record();
  if (handle.read_epoch == record.epoch) return;
  handle.read_epoch = record.epoch;
  ++record.read_handles;
  if (record.read_handles < record.live_handles) return;
  ++record.epoch;
  record.read_handles = 0;
  if (record.fetched) released.storages.push_back(TakeFetched(record));
}

GuardedStorage DeviceOffloader::TakeFetched(StorageRecord& record) {
  if (std::exchange(record.fetched_ahead, false)) {
    prefetched_bytes_ -= record.size_bytes();
    stats_->Update([](OffloadStats& stats) { ++stats.prefetches_dropped; });
  }
  ++record.epoch;
  record.read_handles = 0;
  return std::move(record.fetched);
}

void DeviceOffloader::FetchNow(StorageRecord& record, const BoundStream& stream) {
  GuardedStorage fetched;
  try {
    const AllocationLabel label("saved tensors fetched by Pinion");
    c10::Storage storage;
    try {
      storage = AllocateStorage(stream.torch, record.size_bytes());
    } catch (const c10::OutOfMemoryError&) {
      DropUnreadPrefetches();
      storage = AllocateStorage(stream.torch, record.size_bytes());
    }
    const absl::StatusOr<Transfer> copy = RetryTransient([&] {
      CopyBatch batch(CopyDirection::kHostToDevice);
      batch.Add(record.host, 0, storage.mutable_data(), record.size_bytes());
      return engine_->Submit(std::move(batch), stream.native);
    });
    if (!copy.ok() && IsPoisoned()) storage.unsafeReleaseStorageImpl();
    if (!copy.ok())
      ThrowIfError(copy.status(),
                   IsInHostMemory(record)
                       ? "fetching a saved tensor (its bytes are safe in host memory)"
                       : "fetching a saved tensor");
    fetched = GuardedStorage(std::move(storage), stream, *copy, WaitSite::kFreeAfterCopy);
    if (!options_.overlap) {
      ThrowIfError(copy->Wait(absl::InfiniteDuration()), "waiting for a saved tensor");
    }
  } catch (...) {
    MutexLock lock(mu_);
    record.fetching = false;
    fetched_.NotifyAll();
    throw;
  }
  stats_->Update([&](OffloadStats& stats) {
    ++stats.fetched_on_demand;
    stats.fetched_bytes += record.size_bytes();
  });
  MutexLock lock(mu_);
  record.fetching = false;
  record.fetched_in = CurrentBackward();
  record.fetched = std::move(fetched);  // it was empty: nothing is let go of under mu_
  record.fetched_version = c10::VariableVersion(0);
  fetched_.NotifyAll();
}

bool DeviceOffloader::IsInHostMemory(const StorageRecord& record) {
  Transfer copy_out;
  {
    MutexLock lock(mu_);
    copy_out = record.copy_out;
  }
  return copy_out.IsDone();
}

// ------------------------------------------------------------------------------------ prefetch

void DeviceOffloader::Prefetch(StorageRecord& from) {
  if (!options_.overlap) return;
  for (;;) {
    std::vector<RecordPtr> claimed;
    {
      MutexLock lock(mu_);
      if (prefetch_pause_ > 0) {
        --prefetch_pause_;
        return;
      }
      claimed = ClaimForPrefetch(from);
    }
    if (claimed.empty() || !FetchAhead(claimed)) return;
  }
}

std::vector<DeviceOffloader::RecordPtr> DeviceOffloader::ClaimForPrefetch(StorageRecord& from) {
  std::vector<RecordPtr> claimed;
  const uint64_t limit = Window(options_.prefetch_window_bytes);
  const uint64_t batch_limit = BatchBytes();
  uint64_t batch_bytes = 0;
  for (auto it = from.position; it != order_.begin();) {
    StorageRecord& record = **--it;
    // Before that there is another graph, whose backward may be far away.
    if (record.scope != from.scope) break;
    if (record.state != StorageRecord::CopyOut::kSubmitted || record.source || record.fetched ||
        record.fetching || !record.identity.expired()) {
      continue;
    }
    if (!claimed.empty() && (record.pack_stream.torch != claimed.front()->pack_stream.torch ||
                             batch_bytes + record.size_bytes() > batch_limit)) {
      break;
    }
    if (prefetched_bytes_ > 0 && prefetched_bytes_ + record.size_bytes() > limit) break;
    record.fetching = true;
    record.fetched_ahead = true;
    prefetched_bytes_ += record.size_bytes();
    batch_bytes += record.size_bytes();
    claimed.push_back(record.shared_from_this());
  }
  return claimed;
}

// False when that failed: backward goes on without more prefetches for now. Whatever is wrong with
// the device is for a fetch that is needed to report.
bool DeviceOffloader::FetchAhead(const std::vector<RecordPtr>& records) {
  const BoundStream stream = records.front()->pack_stream;
  std::vector<c10::Storage> storages(records.size());
  absl::StatusOr<Transfer> copy;
  CopyBatch batch(CopyDirection::kHostToDevice);
  try {
    const AllocationLabel label("saved tensors fetched by Pinion");
    for (size_t i = 0; i < records.size(); ++i) {
      storages[i] = AllocateStorage(stream.torch, records[i]->size_bytes());
      batch.Add(records[i]->host, 0, storages[i].mutable_data(), records[i]->size_bytes());
    }
    copy = engine_->Submit(std::move(batch), stream.native);
  } catch (const std::exception& error) {
    copy = absl::UnavailableError(error.what());
  }

  const bool poisoned = !copy.ok() && IsPoisoned();
  const int64_t backward = CurrentBackward();
  Released released;
  uint64_t bytes = 0;
  {
    MutexLock lock(mu_);
    for (size_t i = 0; i < records.size(); ++i) {
      StorageRecord& record = *records[i];
      record.fetching = false;
      if (copy.ok()) {
        record.fetched_in = backward;
        record.fetched_version = c10::VariableVersion(0);
        record.fetched =
            GuardedStorage(std::move(storages[i]), stream, *copy, WaitSite::kFreeAfterCopy);
        bytes += record.size_bytes();
        // The last handle went while the copy was submitted.
        if (record.live_handles == 0) released.storages.push_back(TakeFetched(record));
      } else {
        record.fetched_ahead = false;
        prefetched_bytes_ -= record.size_bytes();
        if (poisoned) storages[i].unsafeReleaseStorageImpl();
      }
    }
    // An allocation that fails is expensive: LibTorch's allocator for CUDA gives its cache back.
    if (copy.ok()) {
      next_prefetch_pause_ = 1;
    } else {
      prefetch_pause_ = std::exchange(next_prefetch_pause_, 2 * next_prefetch_pause_);
    }
    fetched_.NotifyAll();
  }
  stats_->Update([&](OffloadStats& stats) {
    stats.fetched_bytes += bytes;
    if (!copy.ok()) stats.prefetches_refused += records.size();
  });
  return copy.ok();
}

void DeviceOffloader::DropUnreadPrefetches() {
  Released released;
  MutexLock lock(mu_);
  for (StorageRecord* record : order_) {
    if (record->fetched_ahead && record->fetched) released.storages.push_back(TakeFetched(*record));
  }
}

void DeviceOffloader::NoteBackward() {
  const int64_t backward = CurrentBackward();
  if (backward == -1) return;
  {
    MutexLock lock(mu_);
    if (!backwards_.insert(backward).second) return;
    prefetch_pause_ = 0;
    next_prefetch_pause_ = 1;
  }
  // A backward that throws does not run the callback, but lets go of it.
  std::shared_ptr<void> end(
      nullptr, [self = shared_from_this(), backward](void*) { self->EndBackward(backward); });
  AtEndOfBackward([end = std::move(end)]() mutable { end.reset(); });
}

void DeviceOffloader::EndBackward(int64_t backward) {
  Released released;
  MutexLock lock(mu_);
  backwards_.erase(backward);
  for (StorageRecord* record : order_) {
    if (record->fetched && record->fetched_in == backward) {
      released.storages.push_back(TakeFetched(*record));
    }
  }
}

}  // namespace pinion
