// Offloads the saved tensors of one device. Saved tensors with the same bytes share a record.
//
//   pack     creates a record or finds one, and a handle in the graph
//   unpack   returns the bytes if the device has them, else fetches them; then prefetches
//   release  frees a record's memory with its last handle
//
// Related files: offload_state.h (tensors that wait for their copy, records), tensor_departures.h
// (copies out and eviction), tensor_returns.h (fetches), engine/schedule/offload_schedule.h
// (decisions), engine/tier (copies and memory).
//
// Thread safety: thread-safe.
// Ownership: handles share ownership, so a graph may outlive the session.

#ifndef PINION_HOOKS_ACTIVATIONS_DEVICE_OFFLOADER_H_
#define PINION_HOOKS_ACTIVATIONS_DEVICE_OFFLOADER_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "pinion/device/trace/trace_sink.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/schedule/offload_schedule.h"
#include "pinion/engine/tier/device_tier.h"
#include "pinion/engine/tier/host_tier.h"
#include "pinion/hooks/activations/live_tensor.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_state.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/hooks/activations/offload_stats_recorder.h"
#include "pinion/hooks/activations/pack_scope.h"
#include "pinion/hooks/activations/step_learner.h"
#include "pinion/hooks/activations/tensor_departures.h"
#include "pinion/hooks/activations/tensor_returns.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/plan/device_recording.h"
#include "pinion/hooks/plan/parameter_cast.h"

namespace pinion {

class DeviceOffloader : public std::enable_shared_from_this<DeviceOffloader> {
 public:
  // Plans with `link`.
  DeviceOffloader(const OffloadOptions& options, c10::Device device, const LinkCalibration& link,
                  std::shared_ptr<HostTier> host, std::shared_ptr<DeviceTier> tier,
                  std::shared_ptr<OffloadStatsRecorder> stats);

  // What stands for a saved tensor in the graph, and its record's object in a recording.
  struct Packed {
    std::unique_ptr<SavedTensor> handle;
    NotedAs* noted = nullptr;
  };

  // Returns no handle if the tensor stays on the device; the reason is counted. `node` saves the
  // tensor, at PlaceNumber `place` in the scope; 0 without a learner. A leaf (`is_leaf`) stays if
  // the program still references it after its operator, unless OffloadOptions::offload_leaves is
  // set. A `cast` is recast instead of copied.
  Packed Pack(const at::Tensor& tensor, const NodeId& node, uint64_t place, bool is_leaf,
              std::unique_ptr<const ParameterCast> cast, const PackScope& scope);

  // Submits the scope's pending copies and ends it in the schedule. Call it after all operators of
  // the scope have returned.
  void EndScope(ScopeId scope);

  // Keeps tensors of `node`, which belongs to a head, unless their copy was submitted.
  void KeepSavedBy(const NodeId& node) {
    RecordPtrs kept;
    {
      OffloadLock lock(state_);
      kept = state_.books.pending.TakeSavedBy(node);
    }
    departures_.Keep(kept, &OffloadStats::kept_head);
  }
  // Counts a saved tensor that stays on the device without a record.
  void CountKept() {
    OffloadLock lock(state_);
    state_.CountSave();
  }
  void AppendLive(std::vector<LiveTensor>& tensors) { AppendLiveOf(state_, device_, tensors); }

  // Evicts all saved tensors whose copy was submitted, and frees prefetches that were not read. The
  // memory's streams wait for the copies, the host does not.
  void FreeDeviceMemory() {
    returns_.FreeUnneeded();
    departures_.EvictAll();
  }

  // Records and plans steps; null without a memory target.
  StepLearner* learner() const { return learner_.get(); }

  TransferEngine& engine() const { return tier_->engine(); }
  const LinkCalibration& link() const { return link_; }

 private:
  class Handle;

  // Like OffloadState::DeviceBytes; the learner compares the bytes with the target.
  uint64_t DeviceBytes();
  at::Tensor Unpack(Handle& handle);
  // Reports a backward to the schedule and registers for its end. -1 is ignored.
  void NoteBackward(int64_t backward);
  void Release(Handle& handle);
  // Frees a record whose last handle was destroyed.
  void Forget(StorageRecord& record, int64_t backward, Released& released)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu, kRecordsLock);
  // Frees memory that no handle needs. If `size_bytes` is not 0, a copy out may still read it.
  void LetGo(GuardedMemory&& memory, uint64_t size_bytes, int64_t backward, Released& released)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu, kRecordsLock);

  TraceSink* trace() const { return options_.engine.trace.get(); }

  const OffloadOptions options_;
  const c10::Device device_;
  const LinkCalibration link_;
  // Keeps the pool and the engine alive for a graph that outlives the session.
  const std::shared_ptr<HostTier> host_;
  const std::shared_ptr<DeviceTier> tier_;
  const std::shared_ptr<OffloadStatsRecorder> stats_;
  OffloadState state_;
  TensorDepartures departures_;
  TensorReturns returns_;
  const std::unique_ptr<StepLearner> learner_;  // null without a memory target
};

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_DEVICE_OFFLOADER_H_
