// Records that are due, and how they leave.
//
//   DueRecords due;
//   {
//     OffloadLock lock(state);
//     due.Add(state.books.pending.TakeDue(...));
//     due.Sort(state);
//   }
//   departures.CopyOut(due);
//
// Thread safety: none.

#ifndef PINION_HOOKS_ACTIVATIONS_DUE_RECORDS_H_
#define PINION_HOOKS_ACTIVATIONS_DUE_RECORDS_H_

#include <c10/core/Storage.h>

#include <cstddef>
#include <iterator>

#include "absl/base/thread_annotations.h"
#include "absl/container/inlined_vector.h"
#include "pinion/hooks/activations/offload_state.h"
#include "pinion/hooks/activations/storage_record.h"

namespace pinion {

struct DueRecords {
  void Add(RecordPtrs&& more) {
    records.insert(records.end(), std::move_iterator(more.begin()), std::move_iterator(more.end()));
  }

  // Once, under the lock under which they have become due. Leaves that somebody holds stay; those
  // of one stream are a batch.
  void Sort(OffloadState& state) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state.mu, kRecordsLock);

  RecordPtrs records;  // one batch behind the other, and behind them those that stay
  // Of each in a batch.
  absl::InlinedVector<c10::Storage, 1> sources;
  absl::InlinedVector<size_t, 1> ends;  // of the batches
};

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_DUE_RECORDS_H_
