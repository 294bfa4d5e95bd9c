// Sorts records whose copy out is due into batches.
//
//   DueRecords due;
//   {
//     OffloadLock lock(state);
//     due.Add(state.books.pending.TakeDue(...));
//     due.Sort(state);
//   }
//   departures.CopyOut(due);
//
// Thread safety: not thread-safe.

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

  // Call it once, under the same lock under which the records became due. Batches have one stream
  // each. Leaves that the program references are sorted to the end and stay on the device.
  void Sort(OffloadState& state) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state.mu, kRecordsLock);

  RecordPtrs records;  // the batches, then those that stay
  // One per record of a batch.
  absl::InlinedVector<c10::Storage, 1> sources;
  absl::InlinedVector<size_t, 1> ends;  // end index of each batch
};

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_DUE_RECORDS_H_
