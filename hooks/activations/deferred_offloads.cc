#include "pinion/hooks/activations/deferred_offloads.h"

#include <cstdint>
#include <memory>

#include "pinion/hooks/activations/tensor_departures.h"

namespace pinion {
namespace {

// Whether all operators that have saved the record have returned. `node` is the last node that has
// saved something.
bool HaveSaversReturned(const OffloadState& state, const StorageRecord& record, const NodeId& node)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(state.mu, kRecordsLock) {
  const PendingTensors& pending = state.books.pending;
  if (!pending.IsAnyOpen()) return true;
  if (!pending.IsOpen(record.scope) && !record.leaving.saved_elsewhere()) return true;
  return record.leaving.HaveSaversReturned(node);
}

// Offloads a resident record, or drops it to be recast.
void OffloadResident(OffloadState& state, OffloadStatsRecorder& stats, const RecordPtr& record,
                     const NodeId& node, RecordPtrs& due, Released& released)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(state.mu, kRecordsLock) {
  if (record->cast != nullptr && record->cast->IsUnchanged()) {
    released.plain.push_back(record->LeaveToBeCastAgain());
    stats.Update([](OffloadStats& counts) {
      --counts.kept_as_planned;
      ++counts.cast_again;
    });
    return;
  }
  const bool have_returned = HaveSaversReturned(state, *record, node);
  const bool is_open = state.books.pending.IsOpen(record->scope);
  if (!have_returned && !is_open) {
    state.books.pending.AddDeferredOffload(record);
    return;
  }
  stats.Update([&record](OffloadStats& counts) {
    --counts.kept_as_planned;
    ++counts.offloaded;
    counts.offloaded_bytes += record->size_bytes();
  });
  if (have_returned) {
    record->leaving.Decide();
    due.push_back(record);
  } else {
    state.books.pending.Add(record, record->leaving.TakeLastSaver());
  }
}

}  // namespace

void TakeDeferredOffloads(OffloadState& state, OffloadStatsRecorder& stats, const NodeId& node,
                          DueRecords& due, Released& released) {
  for (const std::weak_ptr<StorageRecord>& waiting : state.books.pending.TakeDeferredOffloads()) {
    const RecordPtr record = waiting.lock();
    const bool is_needed = record != nullptr && record->live_handles > 0;
    if (is_needed) OffloadResident(state, stats, record, node, due.records, released);
  }
  for (const uint32_t object : state.schedule->TakeDeferredOffloads()) {
    const RecordPtr record = state.books.storages.TakeStaying(object);
    if (record != nullptr) OffloadResident(state, stats, record, node, due.records, released);
  }
  due.Sort(state);
}

void OffloadForTarget(OffloadState& state, OffloadStatsRecorder& stats, c10::Device device,
                      const NodeId& node, TensorDepartures& departures) {
  if (!state.asks_for_device_bytes) return;
  if (state.share->streamed_bytes() > 0) {
    PlannedSchedule::WeightsBeside beside;
    {
      OffloadLock lock(state);
      beside = state.schedule.target->TakeWeightsBeside();
    }
    // Weights that are used in the step leave its peak bound free, as long as that is kept.
    state.share->EvictIdleWeights(beside.most_bytes, beside.unless_in_use,
                                  state.share->used_last());
  }
  const auto lacks_bytes = [&] {
    OffloadLock lock(state);
    return state.schedule.target->LacksBytes();
  };
  const auto lacks_bytes_with_weights = [&] {
    OffloadLock lock(state);
    return state.schedule.target->LacksBytesWithWeights();
  };
  while (lacks_bytes()) {
    DueRecords due;
    Released released;  // freed after the lock
    const uint64_t device_bytes = state.DeviceBytes(device);
    {
      OffloadLock lock(state);
      state.TellDeviceBytes(device_bytes);
      TakeDeferredOffloads(state, stats, node, due, released);
    }
    if (due.records.empty() && released.plain.empty()) {
      // What a step was seen to grow by is in no peak bound.
      if (lacks_bytes_with_weights()) state.share->EvictIdleWeights(/*most_bytes=*/0);
      return;
    }
    departures.CopyOut(due);
  }
}

}  // namespace pinion
