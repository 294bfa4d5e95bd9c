// What a step saves and reads on one device, noted as it happens and made into a StepTrace in the
// end.
//
//   DeviceRecording::Moment begin = recording->Begin();
//   ... a packer makes `saved` of the tensor ...
//   return std::make_unique<RecordedTensor>(saved, recording, begin, {tensor, place, is_leaf});
//
// Work between Begin and End belongs to the packer: its waits do not count as compute, nor its
// allocations as other live bytes.
//
// Thread safety: thread-safe. The mutex is not held during calls of the device, or of LibTorch
// where it may block or free.

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
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/engine/stream/stream_clock.h"
#include "pinion/engine/tier/device_share.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/plan/device_peaks.h"
#include "pinion/hooks/plan/known_storages.h"
#include "pinion/hooks/plan/noted_objects.h"
#include "pinion/hooks/plan/noted_step.h"

namespace pinion {

// The object that a packer's own record of saved bytes is in a recording. A packer that has such
// records keeps one in each; the recording then need not identify the bytes by itself.
class NotedAs {
 public:
  // Returns the object in a recording, by the recording's number.
  std::optional<NotedObjects::Id> In(uint32_t recording) const {
    const uint64_t noted = noted_;
    if (noted >> 32 != recording) return std::nullopt;
    return static_cast<NotedObjects::Id>(noted);
  }
  void Set(uint32_t recording, NotedObjects::Id object) {
    noted_ = (uint64_t{recording} << 32) | object;
  }

 private:
  std::atomic<uint64_t> noted_ = 0;  // of one recording, the last one; recordings begin at 1
};

class DeviceRecording : public std::enable_shared_from_this<DeviceRecording> {
 public:
  static constexpr size_t kMaxEntries = 300'000;  // saves, reads and releases

  using ObjectId = NotedObjects::Id;

  // A point in the device's current stream.
  struct Moment {
    StreamClock::Moment time;
    KnownStorages::Bytes bytes;
    int64_t peak_bytes = 0;  // reported by OnDeviceBytes since the last moment
  };

  // A tensor that a packer has saved. `place` is hashed into its signature. Null `noted`: the
  // packer has no record of the bytes.
  struct Saved {
    const at::Tensor& tensor;
    uint64_t place = 0;
    bool is_leaf = false;
    NotedAs* noted = nullptr;
  };

  // Excludes the memory of streamed weights, as reported by `share`, from all bytes. `share` may be
  // null.
  DeviceRecording(c10::Device device, std::shared_ptr<StreamClock> clock,
                  std::shared_ptr<const DeviceShare> share = nullptr)
      : device_(device), clock_(std::move(clock)), share_(std::move(share)) {}

  // Begins the step, unless it has begun.
  void Start();

  // See MemoryObserver::OnDeviceBytes.
  void OnDeviceBytes(int64_t allocated_bytes, int64_t added_bytes, const void* freed) {
    peaks_.OnDeviceBytes(allocated_bytes - streamed_bytes(), freed, added_bytes);
  }

  // Declares that OnDeviceBytes is not called for all allocations between the last moment and the
  // next one. An upper bound of the memory then counts as the peak.
  void BeginUnobserved();

  // Returns false after Finish, and while the current stream captures a graph. Abandons a recording
  // that reached kMaxEntries, because a graph that is never released leaves the step without an
  // end.
  bool IsRecording();

  Moment Begin();
  // Begins a read. In a backward it also excludes work at the backward's end from the step.
  Moment BeginRead();
  // Adds a handle to the object that contains the tensor. `handle`, the packer's result, must live
  // until ForgetHandle. `part` is the segment that saves it.
  ObjectId EndSave(const Moment& begin, const Saved& saved, const SavedTensor& handle,
                   const std::optional<SegmentPart>& part);
  // Records that reading `handle`, which was saved in `part`, returned `tensor`.
  void EndRead(const Moment& begin, ObjectId object, const at::Tensor& tensor,
               const SavedTensor& handle, const std::optional<SegmentPart>& part);
  // Records the begin of a kept segment inside CurrentPart(). Inputs below `min_bytes` would not be
  // objects if the segment were recomputed.
  void NoteSegment(const SegmentBegin& segment, uint32_t ordinal, uint64_t min_bytes);
  // Must be called before `handle` is destroyed, also if that is not recorded.
  void ForgetHandle(ObjectId object, const SavedTensor& handle);
  // Removes a handle.
  void EndRelease(const Moment& begin, ObjectId object);
  // Excludes the work since `begin` from the step.
  void EndAside(const Moment& begin);

  // Returns FailedPrecondition while the current stream captures a graph, which would then contain
  // the step's last event.
  absl::Status CheckNotCapturing() const;
  // Errors as those of StreamClock::Read.
  absl::StatusOr<StepTrace> Finish();

 private:
  // Excludes the packers' work at a backward's end, which lies between our two callbacks there.
  struct Ending {
    bool has_end = false;  // the second callback is registered
    std::optional<Moment> begin;
  };

  static uint32_t NewNumber();
  // Returns the object that contains the tensor, which it adds if there is none.
  ObjectId ObjectOf(const Saved& saved) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  int64_t streamed_bytes() const {
    return share_ == nullptr ? 0 : static_cast<int64_t>(share_->streamed_bytes());
  }
  // Stops the recording and discards its entries.
  void Abandon();
  Moment End();
  // Returns a moment without its time.
  Moment CountBytes();
  void BeginEnding(int64_t backward);
  void EndEnding(int64_t backward);
  void Append(const Moment& begin, const Moment& end, NotedEntry what)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const uint32_t number_ = NewNumber();  // unique in the process
  const c10::Device device_;
  const std::shared_ptr<StreamClock> clock_;
  const std::shared_ptr<const DeviceShare> share_;
  DevicePeaks peaks_;  // holds memory of objects_ that the program references

  mutable Mutex mu_;
  // Atomic, so that IsRecording takes no lock. Written under mu_.
  std::atomic<bool> finished_ = false;
  std::atomic<bool> has_no_end_ = false;
  std::optional<AllocatorBytes> last_ ABSL_GUARDED_BY(mu_);  // at the last moment
  bool is_unobserved_ ABSL_GUARDED_BY(mu_) = false;          // since the last moment
  std::vector<NotedEntry> entries_ ABSL_GUARDED_BY(mu_);     // the first is the step's begin
  size_t step_entries_ ABSL_GUARDED_BY(mu_) = 1;  // up to the last save, read, release or backward
  size_t uses_ ABSL_GUARDED_BY(mu_) = 0;          // number of accesses in entries_
  NotedObjects objects_ ABSL_GUARDED_BY(mu_);
  std::map<int64_t, Ending> endings_ ABSL_GUARDED_BY(mu_);  // by running backward
};

// A saved tensor that records its reads and its release.
class RecordedTensor final : public SavedTensor {
 public:
  // Ends the save that began at `begin`, in which a packer made `saved` of the tensor in `as`.
  RecordedTensor(std::unique_ptr<SavedTensor> saved, std::shared_ptr<DeviceRecording> recording,
                 const DeviceRecording::Moment& begin, const DeviceRecording::Saved& as)
      : saved_(std::move(saved)),
        recording_(std::move(recording)),
        part_(CurrentPart(as.tensor.device())),
        object_(recording_->EndSave(begin, as, *saved_, part_)) {}
  ~RecordedTensor() override;

  at::Tensor Unpack() override;
  bool IsComputedAgain() const override { return saved_->IsComputedAgain(); }
  bool WasComputedAgain() const override { return saved_->WasComputedAgain(); }
  const void* MemoryOwner() const override { return saved_->MemoryOwner(); }

 private:
  std::unique_ptr<SavedTensor> saved_;
  const std::shared_ptr<DeviceRecording> recording_;
  const std::optional<SegmentPart> part_;
  const DeviceRecording::ObjectId object_;
};

// Runs `work` and excludes it from the recordings. Throws only what `work` throws.
void RunBeside(absl::Span<const std::shared_ptr<DeviceRecording>> recordings,
               absl::FunctionRef<void()> work);

}  // namespace pinion

#endif  // PINION_HOOKS_PLAN_DEVICE_RECORDING_H_
