// How saved tensors come back: the other half is in device_offloader.cc.

#include <c10/util/Exception.h>

#include <exception>
#include <utility>

#include "absl/time/time.h"
#include "pinion/device/allocation_label.h"
#include "pinion/hooks/device_offloader.h"
#include "pinion/hooks/device_offloader_handle.h"

namespace pinion {
namespace {

constexpr int kTransientRetries = 3;

const absl::Status& StatusOf(const absl::Status& status) { return status; }

template <typename T>
const absl::Status& StatusOf(const absl::StatusOr<T>& result) {
  return result.status();
}

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
  const c10::Stream stream = CurrentStream(device_);
  uint64_t begin_bytes = 0;
  c10::Storage storage = Acquire(handle, stream, &begin_bytes);
  stats_->Update([](OffloadStats& stats) { ++stats.unpacked; });
  Prefetch(*handle.record());
  return handle.View(std::move(storage), begin_bytes);
}

c10::Storage DeviceOffloader::Acquire(Handle& handle, const c10::Stream& stream,
                                      uint64_t* begin_bytes) {
  StorageRecord& record = *handle.record();
  for (;;) {
    GuardedStorage fetched;  // let go of after mu_
    Released released;
    c10::Storage storage;
    bool alive = false;
    {
      MutexLock lock(mu_);
      while (record.fetching) fetched_.Wait(mu_);
      storage = record.source;
      if (!storage) {
        if (auto impl = record.identity.lock()) storage = c10::Storage(std::move(impl));
      }
      alive = static_cast<bool>(storage);
      if (!alive && record.fetched) {
        storage = record.fetched.storage();
        fetched = GuardedStorage(storage, record.fetched.stream(), record.fetched.copy(),
                                 WaitSite::kFreeAfterCopy);
        if (std::exchange(record.fetched_ahead, false)) {
          prefetched_bytes_ -= record.size_bytes();
          stats_->Update([](OffloadStats& stats) { ++stats.prefetch_hits; });
        }
      }
      if (storage) {
        MarkRead(handle, released);
      } else {
        record.fetching = true;
      }
    }
    if (alive) {
      stats_->Update([](OffloadStats& stats) { ++stats.reused_on_device; });
      if (stream != record.pack_stream) {
        ThrowIfError(RetryTransient([&] {
                       return engine_->OrderStreams(NativeStream(record.pack_stream),
                                                    NativeStream(stream),
                                                    WaitSite::kUnpackOnOtherStream);
                     }),
                     "ordering backward's stream after forward's");
        RecordOnStream(storage, stream);
      }
      *begin_bytes = 0;
      return storage;
    }
    if (storage) {
      ThrowIfError(RetryTransient([&] {
                     return fetched.copy().WaitOn(NativeStream(stream),
                                                  WaitSite::kUnpackAfterCopyIn);
                   }),
                   "waiting for a saved tensor");
      // The reader's stream has waited, and the framework orders the free after the reader.
      if (stream != fetched.stream()) RecordOnStream(storage, stream);
      fetched.Disarm();
      for (GuardedStorage& read : released.storages) read.Disarm();
      *begin_bytes = record.extent.begin_bytes;
      return storage;
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
  return std::move(record.fetched);
}

void DeviceOffloader::FetchNow(StorageRecord& record, const c10::Stream& stream) {
  GuardedStorage fetched;
  try {
    const AllocationLabel label("saved tensors fetched by Pinion");
    c10::Storage storage;
    try {
      storage = AllocateStorage(stream, record.size_bytes());
    } catch (const c10::OutOfMemoryError&) {
      DropUnreadPrefetches();
      storage = AllocateStorage(stream, record.size_bytes());
    }
    const absl::StatusOr<Transfer> copy = RetryTransient([&] {
      CopyBatch batch(CopyDirection::kHostToDevice);
      batch.Add(record.host, 0, storage.mutable_data(), record.size_bytes());
      return engine_->Submit(std::move(batch), NativeStream(stream));
    });
    if (!copy.ok()) LeakIfPoisoned(storage);
    ThrowIfError(copy.status(), "fetching a saved tensor (its bytes are safe in host memory)");
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
  fetched_.NotifyAll();
}

// ------------------------------------------------------------------------------------ prefetch

void DeviceOffloader::Prefetch(StorageRecord& from) {
  if (!options_.overlap) return;
  for (;;) {
    std::vector<RecordPtr> claimed;
    {
      MutexLock lock(mu_);
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
    if (record.state != StorageRecord::CopyOut::kSubmitted || record.source || record.fetched ||
        record.fetching || !record.identity.expired()) {
      continue;
    }
    if (!claimed.empty() && (record.pack_stream != claimed.front()->pack_stream ||
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
  const c10::Stream stream = records.front()->pack_stream;
  std::vector<c10::Storage> storages(records.size());
  absl::StatusOr<Transfer> copy;
  CopyBatch batch(CopyDirection::kHostToDevice);
  try {
    const AllocationLabel label("saved tensors fetched by Pinion");
    for (size_t i = 0; i < records.size(); ++i) {
      storages[i] = AllocateStorage(stream, records[i]->size_bytes());
      batch.Add(records[i]->host, 0, storages[i].mutable_data(), records[i]->size_bytes());
    }
    copy = engine_->Submit(std::move(batch), NativeStream(stream));
  } catch (const std::exception& error) {
    copy = absl::UnavailableError(error.what());
  }

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
        record.fetched =
            GuardedStorage(std::move(storages[i]), stream, *copy, WaitSite::kFreeAfterCopy);
        bytes += record.size_bytes();
        // The last handle went while the copy was submitted.
        if (record.live_handles == 0) released.storages.push_back(TakeFetched(record));
      } else {
        record.fetched_ahead = false;
        prefetched_bytes_ -= record.size_bytes();
        LeakIfPoisoned(storages[i]);
      }
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
  }
  AtEndOfBackward([self = shared_from_this(), backward] { self->EndBackward(backward); });
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
