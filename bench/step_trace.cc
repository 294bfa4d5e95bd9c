#include "pinion/bench/step_trace.h"

#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "pinion/allocator/base/check.h"
#include "pinion/hooks/autograd/torch_bridge.h"

namespace pinion {
namespace {

// Smaller ones are not worth a policy's while; OffloadOptions has the same default.
constexpr uint64_t kMinSavedBytes = 1024;

}  // namespace

class StepTraceRecorder::Recording : public SavedTensorPacker,
                                     public std::enable_shared_from_this<Recording> {
 public:
  Recording(std::shared_ptr<EmulatedMachine> machine, int device, ParameterStorages parameters)
      : machine_(std::move(machine)), device_(device), parameters_(std::move(parameters)) {
    last_ms_ = ComputeMs();
  }

  std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace& place) override;

  void EndForward() { trace_.forward.push_back({SinceLast(), 0}); }

  StepTrace Finish() {
    // A storage goes back to where it was read last; the earlier reads need no bytes of their own.
    for (const auto& [storage, saved] : saved_) {
      if (saved.last_read >= 0) trace_.backward[saved.last_read].saved_bytes += saved.size_bytes;
    }
    trace_.backward.push_back({SinceLast(), 0});
    return std::exchange(trace_, StepTrace());
  }

 private:
  struct Saved {
    uint64_t size_bytes = 0;
    int64_t last_read = -1;  // in trace_.backward
  };

  class Handle : public SavedTensor {
   public:
    Handle(std::shared_ptr<Recording> recording, const at::Tensor& tensor)
        : recording_(std::move(recording)), tensor_(DetachedAlias(tensor)) {}
    at::Tensor Unpack() override {
      recording_->NoteRead(tensor_);
      return tensor_;
    }

   private:
    const std::shared_ptr<Recording> recording_;
    const at::Tensor tensor_;
  };

  // Compute alone, up to now: with the device idle, nothing that was launched is missing.
  double ComputeMs() {
    const absl::Status synchronized = machine_->SynchronizeDevice(device_);
    PINION_CHECK(synchronized.ok()) << synchronized;
    return machine_->time_stats(device_).compute_busy_ms;
  }

  double SinceLast() {
    const double now_ms = ComputeMs();
    return now_ms - std::exchange(last_ms_, now_ms);
  }

  void NoteRead(const at::Tensor& tensor) {
    const auto found = saved_.find(tensor.storage().unsafeGetStorageImpl());
    if (found == saved_.end()) return;
    found->second.last_read = static_cast<int64_t>(trace_.backward.size());
    trace_.backward.push_back({SinceLast(), 0});
  }

  const std::shared_ptr<EmulatedMachine> machine_;
  const int device_;
  const ParameterStorages parameters_;
  double last_ms_ = 0;
  StepTrace trace_;
  // Storages stay alive through their handles until backward has read them.
  absl::flat_hash_map<const c10::StorageImpl*, Saved> saved_;
};

std::unique_ptr<SavedTensor> StepTraceRecorder::Recording::Pack(const at::Tensor& tensor,
                                                                const GraphPlace&) {
  const TensorKind kind =
      ClassifyTensor(tensor, c10::DeviceType::PrivateUse1, kMinSavedBytes, parameters_);
  if (kind == TensorKind::kActivation || kind == TensorKind::kHeldLeaf) {
    const uint64_t size_bytes = tensor.storage().nbytes();
    const bool first =
        saved_.try_emplace(tensor.storage().unsafeGetStorageImpl(), Saved{size_bytes}).second;
    if (first) trace_.forward.push_back({SinceLast(), size_bytes});
  }
  return std::make_unique<Handle>(shared_from_this(), tensor);
}

StepTraceRecorder::StepTraceRecorder(std::shared_ptr<EmulatedMachine> machine, int device,
                                     ParameterStorages parameters)
    : recording_(std::make_shared<Recording>(std::move(machine), device, std::move(parameters))) {}

StepTraceRecorder::~StepTraceRecorder() = default;

std::shared_ptr<SavedTensorPacker> StepTraceRecorder::packer() { return recording_; }

void StepTraceRecorder::EndForward() { recording_->EndForward(); }

StepTrace StepTraceRecorder::Finish() { return recording_->Finish(); }

}  // namespace pinion
