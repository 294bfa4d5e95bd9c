// Offloads saved tensors of a device: forms parcels, submits their copies, and evicts copied
// parcels.
//
// Thread safety: TensorDepartures is thread-safe, DueRecords is not.

#ifndef PINION_HOOKS_ACTIVATIONS_TENSOR_DEPARTURES_H_
#define PINION_HOOKS_ACTIVATIONS_TENSOR_DEPARTURES_H_

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <iterator>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/schedule/back_off.h"
#include "pinion/engine/schedule/offload_schedule.h"
#include "pinion/engine/stream/wait_site.h"
#include "pinion/engine/tier/device_tier.h"
#include "pinion/engine/tier/guarded_memory.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_state.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/hooks/activations/offload_stats_recorder.h"
#include "pinion/hooks/activations/storage_record.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/wait_sites.h"

namespace pinion {

// Without overlap the host waits for the copy before it evicts.
inline constexpr WaitSite kBlockingCopyOut("kBlockingCopyOut", kHooksWaits);

// Records whose copy out is due, sorted into batches.
//
//   DueRecords due;
//   {
//     OffloadLock lock(state);
//     due.Add(state.books.pending.TakeDue(...));
//     due.Sort(state);
//   }
//   departures.CopyOut(due);
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

class TensorDepartures {
 public:
  TensorDepartures(const OffloadOptions& options, const LinkCalibration& link, c10::Device device,
                   DeviceTier& tier, OffloadState& state, OffloadStatsRecorder& stats)
      : options_(options),
        link_(link),
        device_(device),
        tier_(tier),
        state_(state),
        stats_(stats) {}

  // Submits the copies of the batches, except those whose stream captures a graph. Takes the
  // sources. Then evicts what the schedule has in excess.
  void CopyOut(DueRecords& due);

  // Counts records whose copy will not be made as kept for `reason`.
  void Keep(absl::Span<const RecordPtr> records, uint64_t OffloadStats::*reason);

  // Evicts all parcels whose copy was submitted.
  void EvictAll();

 private:
  // A parcel before its copy is submitted.
  struct ParcelDraft {
    std::shared_ptr<SavedParcel> parcel;
    RecordPtrs records;
    absl::InlinedVector<uint64_t, 1> offsets;      // one per record, in the parcel
    absl::InlinedVector<c10::Storage, 1> sources;  // one per record
    Departure departure;
  };

  // Device memory that the schedule evicts.
  struct Excess {
    GuardedMemories memories;
    uint64_t bytes = 0;  // size of its parcels
  };

  // Without overlap: waits for the copy of a published draft, then evicts it.
  void EvictBlocking(const ParcelDraft& draft);
  // Returns parcels of records of one pack stream, with their places in the host tier, gathered as
  // planned if possible. Moves from `sources`. Records that cannot be offloaded are counted as
  // kept.
  absl::InlinedVector<ParcelDraft, 1> PlanParcels(absl::Span<const RecordPtr> records,
                                                  absl::Span<c10::Storage> sources);
  // Returns whether the tensors are small slices of storages that are far larger than the parcel.
  bool HoldsMuchMore(const ParcelDraft& draft);
  // Returns whether the device may have so much more: no plan counts a gather.
  bool FitsTarget(uint64_t size_bytes) const;
  // Returns an empty storage on failure; the pieces can then be copied one by one.
  c10::Storage Gather(const ParcelDraft& draft, const BoundStream& stream);
  void TakeChecksums(const ParcelDraft& draft, const BoundStream& stream);
  // Makes a parcel visible to readers after its copy was submitted.
  void Publish(ParcelDraft& draft, Released& released)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu, kRecordsLock);
  // Returns false if nothing is in excess.
  bool TakeExcess(Excess& excess) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu, kRecordsLock);
  void Drop(Excess& excess);
  bool EvictSome();
  GuardedMemories Evict(absl::Span<ScheduledParcel* const> parcels)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu, kRecordsLock);

  const OffloadOptions& options_;
  const LinkCalibration& link_;
  const c10::Device device_;
  DeviceTier& tier_;
  OffloadState& state_;
  OffloadStatsRecorder& stats_;

  Mutex gather_mu_;
  BackOff gather_back_off_ ABSL_GUARDED_BY(gather_mu_);  // counts gathers
};

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_TENSOR_DEPARTURES_H_
