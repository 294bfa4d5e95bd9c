#include "pinion/hooks/activations/due_records.h"

#include <c10/core/Stream.h>

#include <algorithm>

namespace pinion {

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
