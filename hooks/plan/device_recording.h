// What a step saves and reads on one device, noted as it happens and made into a StepTrace in the
// end.
//
//   DeviceRecording::Moment begin = recording->Begin();
//   ... the tensor is packed, by whoever packs it ...
//   recording->EndSave(begin, tensor, place, is_leaf);
//
// What happens between Begin and End is what others do for the tensor: their waits are no compute,
// and the memory that they allocate is none of the other live bytes.
//
// Thread safety: thread-safe. No call of the device is made with the mutex held, nor one of
// LibTorch that may block or free.

#ifndef PINION_HOOKS_PLAN_DEVICE_RECORDING_H_
#define PINION_HOOKS_PLAN_DEVICE_RECORDING_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/engine/stream/stream_clock.h"
#include "pinion/engine/tier/device_share.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/autograd/segment_part.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/plan/device_peaks.h"
#include "pinion/hooks/plan/known_storages.h"
#include "pinion/hooks/plan/noted_objects.h"
#include "pinion/hooks/plan/noted_step.h"

namespace pinion {

class DeviceRecording : public std::enable_shared_from_this<DeviceRecording> {
 public:
  static constexpr size_t kMaxEntries = 300'000;  // saves, reads and releases

  using ObjectId = NotedObjects::Id;

  // A point of the device's current stream.
  struct Moment {
    StreamClock::Moment time;
    KnownStorages::Bytes bytes;
    int64_t peak_bytes = 0;  // since the last moment, as far as OnDeviceBytes was told
  };

  // What weights have there by `share`, which come and go by themselves, is left out of all bytes.
  // Null: there is no such thing.
  DeviceRecording(c10::Device device, std::shared_ptr<StreamClock> clock,
                  std::shared_ptr<const DeviceShare> share = nullptr)
      : device_(device), clock_(std::move(clock)), share_(std::move(share)) {}

  // The step begins here, unless it has begun.
  void Start();

  // As MemoryObserver::OnDeviceBytes.
  void OnDeviceBytes(int64_t allocated_bytes, const void* freed) {
    peaks_.OnDeviceBytes(allocated_bytes - visiting_bytes(), freed);
  }

  // Until the next moment OnDeviceBytes is not told, and the most that there may have been counts
  // as a peak.
  void BeginUnobserved();

  // Not while the current stream captures a graph, and not once Finish was called. A step of so
  // many entries that it has no end, most likely, is abandoned: somebody keeps a graph for good.
  bool IsRecording();

  Moment Begin();
  // The same for a read. In a backward it also sees to what is done at that one's end.
  Moment BeginRead();
  // One more handle of the object that `tensor` is part of. `place` goes into its signature.
  // `saved`, what was made of it, lives until ForgetSaved. `part`: of the forward that saves it.
  ObjectId EndSave(const Moment& begin, const at::Tensor& tensor, uint64_t place, bool is_leaf,
                   const SavedTensor& saved, const std::optional<SegmentPart>& part);
  // `tensor` is what was read of `saved`, which was saved in that part.
  void EndRead(const Moment& begin, ObjectId object, const at::Tensor& tensor,
               const SavedTensor& saved, const std::optional<SegmentPart>& part);
  // A segment that is kept begins, inside of CurrentPart() if there is one. Inputs of less than
  // `min_bytes` would be no objects if it were computed again.
  void NoteSegment(const SegmentBegin& segment, uint32_t ordinal, uint64_t min_bytes);
  // `saved` is about to go, whether that is recorded or not.
  void ForgetSaved(ObjectId object, const SavedTensor& saved);
  // One handle less.
  void EndRelease(const Moment& begin, ObjectId object);
  // Nothing was saved, read or released.
  void EndAside(const Moment& begin);

  // FailedPrecondition while the current stream captures: the last event would be the graph's.
  absl::Status CheckNotCapturing() const;
  // Errors as those of StreamClock::Read.
  absl::StatusOr<StepTrace> Finish();

 private:
  // What packers do when a backward ends lies between our first call at its end and our second.
  struct Ending {
    bool has_end = false;  // the second call is asked for
    std::optional<Moment> begin;
  };

  int64_t visiting_bytes() const {
    return share_ == nullptr ? 0 : static_cast<int64_t>(share_->visiting_bytes());
  }
  // Nothing is recorded any more, and what was is forgotten.
  void Abandon();
  Moment End();
  // All of a moment but its time.
  Moment CountBytes();
  void BeginEnding(int64_t backward);
  void EndEnding(int64_t backward);
  void Append(const Moment& begin, const Moment& end, NotedEntry what)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const c10::Device device_;
  const std::shared_ptr<StreamClock> clock_;
  const std::shared_ptr<const DeviceShare> share_;
  DevicePeaks peaks_;  // holds what the program holds of objects_

  mutable Mutex mu_;
  // Both are written under mu_, so that to ask before each save and read takes no lock.
  std::atomic<bool> finished_ = false;
  std::atomic<bool> has_no_end_ = false;
  std::optional<AllocatorBytes> last_ ABSL_GUARDED_BY(mu_);  // at the last moment
  bool is_unobserved_ ABSL_GUARDED_BY(mu_) = false;          // since then
  std::vector<NotedEntry> entries_ ABSL_GUARDED_BY(mu_);     // the first is the step's begin
  size_t uses_ ABSL_GUARDED_BY(mu_) = 0;                     // among them
  NotedObjects objects_ ABSL_GUARDED_BY(mu_);
  std::map<int64_t, Ending> endings_ ABSL_GUARDED_BY(mu_);  // by backward, those that run
};

}  // namespace pinion

#endif  // PINION_HOOKS_PLAN_DEVICE_RECORDING_H_
