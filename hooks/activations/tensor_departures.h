// How saved tensors that are due leave a device: which of them share a parcel, the copies, and the
// eviction of what has left.
//
// Thread safety: thread-safe.

#ifndef PINION_HOOKS_ACTIVATIONS_TENSOR_DEPARTURES_H_
#define PINION_HOOKS_ACTIVATIONS_TENSOR_DEPARTURES_H_

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

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
#include "pinion/hooks/activations/due_records.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_state.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/hooks/activations/storage_record.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/wait_sites.h"

namespace pinion {

// Without overlap, the host waits before it drops device memory.
inline constexpr WaitSite kBlockingCopyOut("kBlockingCopyOut", kHooksWaits);

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

  // The batches leave, but for those whose stream captures a graph, and take the sources with them.
  // Then the device memory goes that the schedule has in excess.
  void CopyOut(DueRecords& due);

  // Their copies will not be made: the device keeps the bytes. They count as kept for `reason`.
  void Keep(absl::Span<const RecordPtr> records, uint64_t OffloadStats::*reason);

  // Drops all device memory whose copy out was submitted.
  void EvictAll();

 private:
  // A parcel in the making.
  struct ParcelDraft {
    std::shared_ptr<SavedParcel> parcel;
    RecordPtrs records;
    absl::InlinedVector<uint64_t, 1> offsets;      // of each in the parcel
    absl::InlinedVector<c10::Storage, 1> sources;  // of each
    Departure departure;
  };

  // Device memory that the schedule has in excess.
  struct Excess {
    GuardedMemories memories;
    uint64_t bytes = 0;  // of its parcels
  };

  // Records of one pack stream, which does not capture a graph, and the source of each, which is
  // moved from. With `evicts` it may drop what the schedule has in excess as well, under the lock
  // that it takes anyway; returns whether it has.
  bool SubmitCopyOut(const BoundStream& stream, absl::Span<const RecordPtr> records,
                     absl::Span<c10::Storage> sources, bool evicts);
  // The baseline without overlap: the host waits, then the device memory goes.
  void CopyOutBlocking(const RecordPtr& record, c10::Storage& source);
  // Those that can leave, each with its place in the host tier, gathered where that was planned and
  // possible.
  absl::InlinedVector<ParcelDraft, 1> PlanParcels(const BoundStream& stream,
                                                  absl::Span<const RecordPtr> records,
                                                  absl::Span<c10::Storage> sources);
  // Whether the tensors are small slices of storages that hold far more device memory than the
  // parcel.
  bool HoldsMuchMore(const ParcelDraft& leaving);
  // Empty if that is not possible now: the pieces can be copied one by one.
  c10::Storage Gather(const ParcelDraft& leaving, const BoundStream& stream);
  void TakeChecksums(const ParcelDraft& leaving, const BoundStream& stream);
  // The copy was submitted.
  void Publish(ParcelDraft& leaving, Released& released)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu, kRecordsLock);
  // False: there is none.
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
  BackOff gather_back_off_ ABSL_GUARDED_BY(gather_mu_);  // in gathers
};

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_TENSOR_DEPARTURES_H_
