#include "pinion/hooks/plan/step_recorder.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/engine/stream/stream_clock.h"
#include "pinion/hooks/autograd/memory_observer.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/plan/device_recording.h"
#include "pinion/hooks/plan/noted_objects.h"
#include "pinion/hooks/plan/offload_policy.h"

namespace pinion {
namespace {

std::unique_ptr<SavedTensor> PackUnrecorded(const at::Tensor& tensor, const GraphPlace& place,
                                            SavedTensorPacker* packer) {
  return packer == nullptr ? KeepTensor(tensor) : packer->Pack(tensor, place);
}

class StepRecorderImpl final : public StepRecorder,
                               public SavedTensorWatcher,
                               public MemoryObserver {
 public:
  StepRecorderImpl(DeviceBackend backend, c10::DeviceType type)
      : backend_(std::move(backend)), type_(type) {}

  // Begins the step on the current device.
  void Start() {
    const c10::Device device = c10::impl::VirtualGuardImpl(type_).getDevice();
    if (const std::shared_ptr<DeviceRecording> recording = RecordingOf(device)) recording->Start();
    MutexLock lock(mu_);
    if (!begin_.has_value()) begin_ = CurrentNode();
  }

  std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace& place,
                                    SavedTensorPacker* packer) override {
    // Saves of a backward are needed soon.
    if (CurrentBackward() != -1) return PackUnrecorded(tensor, place, packer);
    const TensorKind kind = ClassifyTensor(tensor, type_, kMinOffloadBytes, /*parameters=*/nullptr);
    if (kind != TensorKind::kActivation && kind != TensorKind::kHeldLeaf) {
      return PackUnrecorded(tensor, place, packer);
    }
    const std::shared_ptr<DeviceRecording> recording = RecordingOf(tensor.device());
    if (recording == nullptr || !recording->IsRecording()) {
      return PackUnrecorded(tensor, place, packer);
    }
    const DeviceRecording::Moment begin = recording->Begin();
    std::unique_ptr<SavedTensor> saved = PackUnrecorded(tensor, place, packer);
    if (saved == nullptr || saved->IsPlaceholder()) {
      recording->EndAside(begin);
      return saved;
    }
    const DeviceRecording::Saved as = {
        .tensor = tensor, .place = PlaceInStep(place), .is_leaf = kind == TensorKind::kHeldLeaf};
    return std::make_unique<RecordedTensor>(std::move(saved), recording, begin, as);
  }

  void OnSegmentKept(const SegmentBegin& segment, uint32_t ordinal) override {
    if (segment.device.type() != type_ || CurrentBackward() != -1) return;
    const std::shared_ptr<DeviceRecording> recording = RecordingOf(segment.device);
    if (recording != nullptr) recording->NoteSegment(segment, ordinal, kMinOffloadBytes);
  }

  void RunAside(absl::FunctionRef<void()> work) override {
    std::vector<std::shared_ptr<DeviceRecording>> recordings;
    for (const auto& [index, recording] : Recordings()) recordings.push_back(recording);
    RunBeside(recordings, work);
  }

  // mu_ is never held during a call of a device's allocator, which calls this.
  void OnDeviceBytes(c10::Device device, int64_t allocated_bytes, int64_t added_bytes,
                     const void* freed) override {
    if (device.type() != type_) return;
    std::shared_ptr<DeviceRecording> recording;
    {
      MutexLock lock(mu_);
      if (const auto found = recordings_.find(device.index()); found != recordings_.end()) {
        recording = found->second;
      }
    }
    if (recording != nullptr) recording->OnDeviceBytes(allocated_bytes, added_bytes, freed);
  }
  void OnUnobserved() override {
    for (const auto& [index, recording] : Recordings()) recording->BeginUnobserved();
  }

  absl::StatusOr<std::map<int, StepTrace>> Finish() override {
    for (const auto& [index, recording] : Recordings()) {
      PINION_RETURN_IF_ERROR(recording->CheckNotCapturing());
    }
    std::map<int, std::shared_ptr<DeviceRecording>> recordings;
    {
      MutexLock lock(mu_);
      recordings.swap(recordings_);
      begin_.reset();
    }
    IgnoreBackwards(*this);
    std::map<int, StepTrace> steps;
    absl::Status failed;
    for (const auto& [index, recording] : recordings) {
      absl::StatusOr<StepTrace> step = recording->Finish();
      failed.Update(step.status());
      if (step.ok()) steps[index] = *std::move(step);
    }
    if (!failed.ok()) return failed;
    return steps;
  }

 private:
  std::map<int, std::shared_ptr<DeviceRecording>> Recordings() {
    MutexLock lock(mu_);
    return recordings_;
  }

  uint64_t PlaceInStep(const GraphPlace& place) {
    MutexLock lock(mu_);
    if (!begin_.has_value()) return 0;
    return PlaceNumber(*begin_, place);
  }

  // Returns the step's recording, which it creates if necessary; null if the device cannot be
  // opened.
  std::shared_ptr<DeviceRecording> RecordingOf(c10::Device device);

  const DeviceBackend backend_;
  const c10::DeviceType type_;
  Mutex mu_;
  std::optional<NodeId> begin_ ABSL_GUARDED_BY(mu_);  // newest node at the step's begin
  std::map<int, std::shared_ptr<StreamClock>> clocks_ ABSL_GUARDED_BY(mu_);
  std::map<int, std::shared_ptr<DeviceRecording>> recordings_ ABSL_GUARDED_BY(mu_);
};

std::shared_ptr<DeviceRecording> StepRecorderImpl::RecordingOf(c10::Device device) {
  std::shared_ptr<StreamClock> clock;
  {
    MutexLock lock(mu_);
    if (const auto found = recordings_.find(device.index()); found != recordings_.end()) {
      return found->second;
    }
    if (const auto found = clocks_.find(device.index()); found != clocks_.end()) {
      clock = found->second;
    }
  }
  if (clock == nullptr) {
    absl::StatusOr<std::shared_ptr<Device>> native = backend_.Open(device.index());
    if (!native.ok()) {
      PINION_LOG(kWarning) << "step recording: saved tensors on " << device.str()
                           << " are not recorded: " << native.status();
      return nullptr;
    }
    clock = std::make_shared<StreamClock>(*std::move(native));
  }
  MutexLock lock(mu_);
  clock = clocks_.try_emplace(device.index(), std::move(clock)).first->second;
  auto& recording = recordings_[device.index()];
  if (recording == nullptr) recording = std::make_shared<DeviceRecording>(device, std::move(clock));
  return recording;
}

}  // namespace

absl::StatusOr<std::shared_ptr<StepRecorder>> StepRecorder::Create(DeviceBackend backend) {
  PINION_ASSIGN_OR_RETURN(const c10::DeviceType type, DeviceTypeOf(backend.type_name));
  PINION_RETURN_IF_ERROR(backend.Validate());
  PINION_RETURN_IF_ERROR(CheckTorchHas(type));
  PINION_RETURN_IF_ERROR(CheckIsRegistered(backend, type));
  if (!TellsAllocatedBytes(type)) {
    return absl::UnimplementedError(absl::StrCat(
        "a step cannot be recorded on \"", backend.type_name,
        "\": LibTorch's allocator for it does not tell how many bytes are live (it is no "
        "c10::DeviceAllocator)"));
  }
  return std::make_shared<StepRecorderImpl>(std::move(backend), type);
}

struct RecordScope::State {
  explicit State(const std::shared_ptr<StepRecorderImpl>& recorder)
      : scope(recorder, "RecordScope"), memory(recorder) {}
  const WatchScope scope;
  const MemoryScope memory;
};

RecordScope::RecordScope(const std::shared_ptr<StepRecorder>& recorder) {
  const auto impl = std::dynamic_pointer_cast<StepRecorderImpl>(recorder);
  PINION_CHECK(impl != nullptr) << "RecordScope needs a recorder of StepRecorder::Create";
  impl->Start();
  state_ = std::make_unique<State>(impl);
  ObserveBackwards(impl);
}

RecordScope::~RecordScope() = default;

}  // namespace pinion
