#include "pinion/hooks/device_offloader.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "absl/time/time.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/hooks/device_offloader_handle.h"

namespace pinion {
namespace {

constexpr uint64_t kMaxBatchBytes = kMiB;
constexpr uint64_t kMaxAutoWindowBytes = 256 * kMiB;
// CPU kernels may choose a code path by alignment; what comes back keeps its address modulo this.
constexpr uint64_t kAlignmentBytes = 512;

// All of the storage when the tensor covers half of it or more, so that its other views share one
// copy; else only what the tensor can touch (a small view of a flat buffer must not move it all).
StorageExtent ExtentToSave(const at::Tensor& tensor) {
  const uint64_t storage_bytes = tensor.storage().nbytes();
  StorageExtent extent = ExtentOf(tensor);
  if (2 * extent.size_bytes() >= storage_bytes) return {0, storage_bytes};
  extent.begin_bytes &= ~(kAlignmentBytes - 1);
  return extent;
}

}  // namespace

DeviceOffloader::DeviceOffloader(const OffloadOptions& options, c10::Device device,
                                 std::shared_ptr<TransferEngine> engine,
                                 std::shared_ptr<PinnedAllocator> allocator,
                                 std::shared_ptr<OffloadStatsRecorder> stats)
    : options_(options),
      device_(device),
      engine_(std::move(engine)),
      allocator_(std::move(allocator)),
      stats_(std::move(stats)) {}

uint64_t DeviceOffloader::Window(uint64_t option) const {
  if (option != OffloadOptions::kAutoWindow) return option;
  return std::max(2 * std::max(scope_.largest, last_scope_.largest),
                  std::min(kMaxAutoWindowBytes, last_scope_.total / 16));
}

uint64_t DeviceOffloader::BatchBytes() const {
  return std::min(kMaxBatchBytes, Window(options_.eviction_window_bytes) / 4);
}

bool DeviceOffloader::IsPoisoned() const { return !engine_->health().ok(); }

// ---------------------------------------------------------------------------------------- pack

std::unique_ptr<SavedTensor> DeviceOffloader::Pack(const at::Tensor& tensor, bool maybe_held) {
  const BoundStream stream(CurrentStream(device_));
  const auto keep = [this](uint64_t OffloadStats::*reason) {
    stats_->Update([reason](OffloadStats& stats) { ++(stats.*reason); });
    return nullptr;
  };
  if (IsPoisoned()) return keep(&OffloadStats::kept_copy_failed);
  const absl::StatusOr<bool> capturing = engine_->IsCapturing(stream.native);
  if (!capturing.ok()) return keep(&OffloadStats::kept_copy_failed);
  if (*capturing) return keep(&OffloadStats::kept_capturing);

  const c10::Storage& storage = tensor.storage();
  const StorageExtent extent = ExtentToSave(tensor);
  const SavedVersion version(tensor);
  {
    MutexLock lock(mu_);
    if (RecordPtr shared = FindShared(storage, version, ExtentOf(tensor), tensor.itemsize())) {
      ++shared->live_handles;
      stats_->Update([](OffloadStats& stats) {
        ++stats.shared;
        ++stats.live_handles;
      });
      return std::make_unique<Handle>(shared_from_this(), std::move(shared), tensor);
    }
  }

  absl::StatusOr<PinnedBlock> block = allocator_->Allocate(extent.size_bytes());
  if (!block.ok()) return keep(&OffloadStats::kept_no_host_memory);

  const uint64_t node = CurrentNode();
  auto record = std::make_shared<StorageRecord>(storage, version, extent, stream, maybe_held, node);
  record->host = std::make_shared<HostBuffer>(*std::move(block));
  record->live_handles = 1;
  auto handle = std::make_unique<Handle>(shared_from_this(), record, tensor);
  const uint64_t size_bytes = record->size_bytes();
  stats_->Update([size_bytes](OffloadStats& stats) {
    ++stats.offloaded;
    ++stats.live_handles;
    stats.offloaded_bytes += size_bytes;
  });

  bool flush = false;
  {
    MutexLock lock(mu_);
    by_storage_[storage.unsafeGetStorageImpl()].push_back(record.get());
    record->position = order_.insert(order_.end(), record.get());
    record->scope = scope_number_;
    scope_.largest = std::max(scope_.largest, size_bytes);
    scope_.total += size_bytes;
    if (options_.overlap) {
      record->in_window = true;
      window_bytes_ += size_bytes;
      record->window_position = window_.insert(window_.end(), record.get());
      pending_.push_back(record);
      pending_bytes_ += size_bytes;
      flush = pending_bytes_ >= BatchBytes();
    }
  }
  if (!options_.overlap) {
    CopyOutBlocking(record);
    return handle;
  }
  if (flush) FlushPending(node);
  EvictOverWindow(node);
  return handle;
}

DeviceOffloader::RecordPtr DeviceOffloader::FindShared(const c10::Storage& storage,
                                                       const SavedVersion& version,
                                                       const StorageExtent& extent,
                                                       uint64_t item_bytes) {
  const auto found = by_storage_.find(storage.unsafeGetStorageImpl());
  if (found == by_storage_.end()) return nullptr;
  for (StorageRecord* record : found->second) {
    if (record->version == version && record->HasItsMemory(storage) &&
        record->extent.begin_bytes <= extent.begin_bytes &&
        extent.end_bytes <= record->extent.end_bytes &&
        record->extent.begin_bytes % item_bytes == 0) {
      return record->shared_from_this();
    }
  }
  return nullptr;
}

void DeviceOffloader::EndScope() {
  if (!options_.overlap) return;
  FlushPending(std::nullopt);
  MutexLock lock(mu_);
  ++scope_number_;
  if (scope_.total > 0) last_scope_ = std::exchange(scope_, ScopeBytes());
}

// A record whose copy will not be made: the device keeps the bytes, the host block goes back.
void DeviceOffloader::KeepOnDevice(StorageRecord& record, Released& released) {
  record.state = StorageRecord::CopyOut::kNone;
  released.hosts.push_back(std::move(record.host));
  LeaveWindow(record);
}

void DeviceOffloader::LeaveWindow(StorageRecord& record) {
  if (!record.in_window) return;
  record.in_window = false;
  window_.erase(record.window_position);
  window_bytes_ -= record.size_bytes();
}

void DeviceOffloader::FlushPending(std::optional<uint64_t> running_node) {
  std::vector<RecordPtr> taken;  // let go of after mu_
  std::vector<RecordPtr> batch;
  Released released;
  uint64_t held = 0;
  uint64_t held_bytes = 0;
  {
    MutexLock lock(mu_);
    taken.swap(pending_);
    for (const RecordPtr& record : taken) {
      if (record->live_handles == 0) continue;
      if (record->maybe_held && record->node == running_node) {
        pending_.push_back(record);
        continue;
      }
      pending_bytes_ -= record->size_bytes();
      // Inputs are leaves and so are dropout masks. By now the operator that made a mask has let
      // go of it, while an input is still held: only the former's copy would free anything.
      if (record->maybe_held && record->source.use_count() > 1) {
        ++held;
        held_bytes += record->size_bytes();
        KeepOnDevice(*record, released);
        continue;
      }
      record->state = StorageRecord::CopyOut::kSubmitting;
      batch.push_back(record);
    }
  }
  if (held > 0) {
    stats_->Update([&](OffloadStats& stats) {
      stats.kept_held += held;
      stats.offloaded -= held;
      stats.offloaded_bytes -= held_bytes;
    });
  }
  // One batch per pack stream: its copies start after that stream's present work.
  while (!batch.empty()) {
    const c10::Stream stream = batch.front()->pack_stream.torch;
    const auto rest = std::stable_partition(
        batch.begin(), batch.end(),
        [&](const RecordPtr& record) { return record->pack_stream.torch == stream; });
    SubmitCopyOut({batch.begin(), rest});
    batch.erase(batch.begin(), rest);
  }
}

void DeviceOffloader::SubmitCopyOut(const std::vector<RecordPtr>& records) {
  // Keeps the device memory alive while mu_ is not held, whatever becomes of the handles.
  std::vector<c10::Storage> sources;
  CopyBatch batch(CopyDirection::kDeviceToHost);
  Released released;
  uint64_t failed = 0;
  uint64_t failed_bytes = 0;
  {
    MutexLock lock(mu_);
    for (const RecordPtr& record : records) {
      sources.emplace_back();
      if (!record->source) continue;  // its last handle went meanwhile
      if (!record->HasItsMemory(record->source)) {
        KeepOnDevice(*record, released);
        ++failed;
        failed_bytes += record->size_bytes();
        continue;
      }
      sources.back() = record->source;
      // Read only; mutable_data() would make a lazily cloned storage copy itself.
      char* const data = static_cast<char*>(const_cast<void*>(record->data));
      batch.Add(record->host, 0, data + record->extent.begin_bytes, record->size_bytes());
    }
  }
  const BoundStream stream = records.front()->pack_stream;
  absl::StatusOr<Transfer> copy = Transfer();
  if (!batch.empty()) {
    try {
      // The copy is ordered with the pack stream, the memory's reuse with the stream that it was
      // allocated on.
      for (const c10::Storage& source : sources) {
        if (source) RecordOnStream(source, stream.torch);
      }
      // Not retried: the tensor is on the device and may simply stay there.
      copy = engine_->Submit(std::move(batch), stream.native);
    } catch (const std::exception& error) {
      copy = absl::UnavailableError(error.what());
    }
  }
  if (!copy.ok()) {
    PINION_LOG(kWarning) << "saved tensors stay on the device: " << copy.status();
  }

  const bool poisoned = !copy.ok() && IsPoisoned();

  {
    MutexLock lock(mu_);
    for (size_t i = 0; i < records.size(); ++i) {
      StorageRecord& record = *records[i];
      if (!sources[i]) continue;
      if (!copy.ok()) {
        ++failed;
        failed_bytes += record.size_bytes();
        if (poisoned) sources[i].unsafeReleaseStorageImpl();
        KeepOnDevice(record, released);
        continue;
      }
      record.copy_out = *copy;
      record.state = StorageRecord::CopyOut::kSubmitted;
      // The last handle went while the copy was submitted: its source is ours to guard.
      if (record.live_handles == 0) {
        released.storages.emplace_back(std::move(sources[i]), stream, *copy,
                                       WaitSite::kFreeAfterCopy);
      }
    }
  }
  if (failed > 0) {
    stats_->Update([&](OffloadStats& stats) {
      stats.kept_copy_failed += failed;
      stats.offloaded -= failed;
      stats.offloaded_bytes -= failed_bytes;
    });
  }
}

// The baseline without overlap: the host waits, then the device memory goes.
void DeviceOffloader::CopyOutBlocking(const RecordPtr& record) {
  {
    MutexLock lock(mu_);
    record->state = StorageRecord::CopyOut::kSubmitting;
  }
  SubmitCopyOut({record});
  Transfer copy;
  c10::Storage source;
  {
    MutexLock lock(mu_);
    if (record->state != StorageRecord::CopyOut::kSubmitted) return;
    copy = record->copy_out;
  }
  if (WaitSiteEnabled(WaitSite::kBlockingCopyOut)) {
    ThrowIfError(copy.Wait(absl::InfiniteDuration()), "waiting for a copy to the host");
  }
  {
    MutexLock lock(mu_);
    source = std::exchange(record->source, c10::Storage());
  }
  const bool freed = source.use_count() == 1;
  stats_->Update([&](OffloadStats& stats) {
    stats.evicted_bytes += record->size_bytes();
    if (!freed) ++stats.evicted_not_freed;
  });
}

void DeviceOffloader::EvictOverWindow(uint64_t running_node) {
  std::vector<GuardedStorage> evicted;
  for (bool flushed = false;; flushed = true) {
    bool blocked_by_pending = false;
    uint64_t bytes = 0;
    uint64_t not_freed = 0;
    {
      MutexLock lock(mu_);
      const uint64_t limit = Window(options_.eviction_window_bytes);
      while (window_bytes_ > limit) {
        StorageRecord* const record = window_.front();
        if (record->state == StorageRecord::CopyOut::kPending) {
          blocked_by_pending = true;
          break;
        }
        if (record->state != StorageRecord::CopyOut::kSubmitted) break;  // another thread's turn
        LeaveWindow(*record);
        bytes += record->size_bytes();
        // Whoever else owns it frees it later than this wait, so letting go is safe either way.
        if (record->source.use_count() > 1) ++not_freed;
        evicted.emplace_back(std::exchange(record->source, c10::Storage()), record->pack_stream,
                             record->copy_out, WaitSite::kEvictAfterCopyOut);
      }
    }
    if (bytes > 0) {
      stats_->Update([&](OffloadStats& stats) {
        stats.evicted_bytes += bytes;
        stats.evicted_not_freed += not_freed;
      });
    }
    evicted.clear();
    if (!blocked_by_pending || flushed) return;
    FlushPending(running_node);
  }
}

// ------------------------------------------------------------------------------------- release

void DeviceOffloader::Release(Handle& handle) {
  StorageRecord& record = *handle.record();
  Released released;
  stats_->Update([](OffloadStats& stats) { --stats.live_handles; });
  MutexLock lock(mu_);
  --record.live_handles;
  if (handle.read_epoch == record.epoch) --record.read_handles;
  if (record.live_handles > 0) {
    if (record.fetched && record.read_handles == record.live_handles) {
      released.storages.push_back(TakeFetched(record));
    }
    return;
  }
  const auto found = by_storage_.find(record.identity._unsafe_get_target());
  std::erase(found->second, &record);
  if (found->second.empty()) by_storage_.erase(found);
  order_.erase(record.position);
  LeaveWindow(record);
  if (record.state == StorageRecord::CopyOut::kPending) pending_bytes_ -= record.size_bytes();
  if (record.source) {
    released.storages.emplace_back(std::exchange(record.source, c10::Storage()), record.pack_stream,
                                   record.copy_out, WaitSite::kFreeAfterCopy);
  }
  if (record.fetched) released.storages.push_back(TakeFetched(record));
}

}  // namespace pinion
