// How saved tensors leave a device: which of those that are due stay after all, which share a
// parcel, the copies, and the eviction of what has left.
//
// Thread safety: thread-safe.

#ifndef PINION_HOOKS_ACTIVATIONS_TENSOR_DEPARTURES_H_
#define PINION_HOOKS_ACTIVATIONS_TENSOR_DEPARTURES_H_

#include <c10/core/Storage.h>

#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/engine/plan/back_off.h"
#include "pinion/engine/plan/link_calibration.h"
#include "pinion/engine/plan/offload_schedule.h"
#include "pinion/engine/tier/device_tier.h"
#include "pinion/engine/tier/guarded_memory.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_state.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/hooks/activations/storage_record.h"
#include "pinion/hooks/autograd/torch_bridge.h"

namespace pinion {

class TensorDepartures {
 public:
  TensorDepartures(const OffloadOptions& options, const LinkCalibration& link, DeviceTier& tier,
                   OffloadState& state, OffloadStatsRecorder& stats)
      : options_(options), link_(link), tier_(tier), state_(state), stats_(stats) {}

  // Of records that are due, leaves that somebody holds stay; the others leave.
  void CopyOut(std::vector<RecordPtr> due);

  // Drops the device memory that the schedule has in excess.
  void EvictExcess();
  // Drops all device memory whose copy out was submitted.
  void EvictAll();

 private:
  // A parcel in the making.
  struct Leaving {
    std::vector<RecordPtr> records;
    std::vector<uint64_t> offsets;      // of each in the parcel
    std::vector<c10::Storage> sources;  // of each
    bool gathered = false;
    Departure departure;
  };

  // Records of one pack stream.
  void SubmitCopyOut(const BoundStream& stream, const std::vector<RecordPtr>& records);
  // The baseline without overlap: the host waits, then the device memory goes.
  void CopyOutBlocking(const RecordPtr& record);
  // Those that can leave, each with its place in the host tier, gathered where that was planned and
  // possible.
  std::vector<Leaving> PlanParcels(const BoundStream& stream,
                                   const std::vector<RecordPtr>& records);
  // Whether the tensors are small slices of storages that hold far more device memory than the
  // parcel.
  bool HoldsMuchMore(const Leaving& leaving);
  // Empty if that is not possible now: the pieces can be copied one by one.
  c10::Storage Gather(const Leaving& leaving, const BoundStream& stream);
  void TakeChecksums(const Leaving& leaving, const BoundStream& stream);
  // The copy was submitted.
  void Publish(Leaving& leaving, const std::shared_ptr<SavedParcel>& parcel, Released& released)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  std::vector<GuardedMemory> Evict(const std::vector<ScheduledParcel*>& parcels)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  // Their copies will not be made: the device keeps the bytes. They count as kept for `reason`.
  void Keep(const std::vector<RecordPtr>& records, uint64_t OffloadStats::*reason);

  const OffloadOptions& options_;
  const LinkCalibration& link_;
  DeviceTier& tier_;
  OffloadState& state_;
  OffloadStatsRecorder& stats_;

  Mutex gather_mu_;
  BackOff gather_back_off_ ABSL_GUARDED_BY(gather_mu_);  // in gathers
};

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_TENSOR_DEPARTURES_H_
