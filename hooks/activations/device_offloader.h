// The saved tensors of one device: identity, version and views have their home here.
//
//   pack     a record of the bytes that are saved, which a schedule sends on their way; a handle
//   unpack   storage alive? use it. In the host tier? fetch it, and what comes next
//   release  the last handle of a record lets go of its bytes, wherever they are
//
// What is told elsewhere: which tensors have to wait, and for whom (pending_tensors.h); how they
// leave (tensor_departures.h) and come back (tensor_returns.h); which are evicted and fetched
// ahead, and when (engine/schedule/offload_schedule.h); the copies and their memory (engine/tier).
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
#include "pinion/allocator/base/mutex.h"
#include "pinion/device/trace/trace_sink.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/schedule/offload_schedule.h"
#include "pinion/engine/tier/device_tier.h"
#include "pinion/engine/tier/host_tier.h"
#include "pinion/hooks/activations/live_records.h"
#include "pinion/hooks/activations/live_tensor.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_state.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/hooks/activations/scope_packer.h"
#include "pinion/hooks/activations/step_learner.h"
#include "pinion/hooks/activations/tensor_departures.h"
#include "pinion/hooks/activations/tensor_returns.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/plan/parameter_cast.h"

namespace pinion {

class DeviceOffloader : public std::enable_shared_from_this<DeviceOffloader> {
 public:
  // Plans by `link`.
  DeviceOffloader(const OffloadOptions& options, c10::Device device, const LinkCalibration& link,
                  std::shared_ptr<HostTier> host, std::shared_ptr<DeviceTier> tier,
                  std::shared_ptr<OffloadStatsRecorder> stats);

  // Null when the tensor has to stay on the device; the reason has been counted.
  // One that `is_leaf` stays if someone still holds it once its operator has returned, unless
  // leaves are to be copied (OffloadOptions::offload_leaves). One that is a `cast` is not copied if
  // it is to leave.
  std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace& place, bool is_leaf,
                                    std::unique_ptr<const ParameterCast> cast,
                                    const PackScope& scope);

  // No operator of the scope, which has ended, runs any more: what is pending of it goes, and the
  // schedule learns what it saved.
  void EndScope(ScopeId scope);

  // `node` belongs to a head: what it has saved stays, as far as it has not left.
  void KeepSavedBy(const NodeId& node) {
    RecordPtrs kept;
    {
      OffloadLock lock(state_);
      kept = state_.books.pending.TakeSavedBy(node);
    }
    departures_.Keep(kept, &OffloadStats::kept_head);
  }
  // A tensor was saved that stays on the device, and is not told of otherwise.
  void CountKept() {
    OffloadLock lock(state_);
    state_.CountSave();
  }
  void AppendLive(std::vector<LiveTensor>& tensors) { AppendLiveOf(state_, device_, tensors); }

  // Lets go of all device memory that can be fetched again, or that nobody needs any more: what was
  // fetched ahead and not read yet, and tensors whose copy out was submitted. Its streams wait for
  // the copies, the host does not.
  void FreeDeviceMemory() {
    returns_.FreeUnneeded();
    departures_.EvictAll();
  }

  // With a memory target: records and plans its steps; null without.
  StepLearner* learner() const { return learner_.get(); }

  TransferEngine& engine() const { return tier_->engine(); }
  const LinkCalibration& link() const { return link_; }

 private:
  class Handle;
  // What is to be packed, and where.
  struct Packed {
    const at::Tensor& tensor;
    const NodeId& node;
    uint64_t place;  // that StepLearner::Pack gives, with a learner
    bool is_leaf;
    std::unique_ptr<const ParameterCast> cast;
    const PackScope& scope;
  };

  std::unique_ptr<SavedTensor> PackNow(Packed& packed);
  void EndScopeNow(ScopeId scope);
  at::Tensor Unpack(Handle& handle);
  // The end of `backward`, the one that the calling thread runs (-1: none), will be told of.
  void NoteBackward(int64_t backward);
  void Release(Handle& handle);
  // The record's last handle is gone.
  void Forget(StorageRecord& record, int64_t backward, Released& released)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu, kRecordsLock);
  // `memory`, of that many bytes, that nobody needs any more, and that its copy out may still read
  // (none does if there are 0).
  void LetGo(GuardedMemory&& memory, uint64_t size_bytes, int64_t backward, Released& released)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu, kRecordsLock);

  TraceSink* trace() const { return options_.engine.trace.get(); }

  const OffloadOptions options_;
  const c10::Device device_;
  const LinkCalibration link_;
  // A graph that outlives the session keeps it: who comes next shares its pool and its engine.
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
