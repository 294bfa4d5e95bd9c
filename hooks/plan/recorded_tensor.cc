#include "pinion/hooks/plan/recorded_tensor.h"

#include <exception>
#include <optional>
#include <utility>
#include <vector>

#include "pinion/allocator/base/check.h"
#include "pinion/hooks/autograd/lent_tensors.h"
#include "pinion/hooks/autograd/placeholder_tensor.h"
#include "pinion/hooks/autograd/segment_part.h"

namespace pinion {
namespace {

// Records reads and the release of a packer's saved tensor.
class RecordedTensor : public SavedTensor {
 public:
  RecordedTensor(std::unique_ptr<SavedTensor> saved, std::shared_ptr<DeviceRecording> recording)
      : saved_(std::move(saved)), recording_(std::move(recording)) {}

  ~RecordedTensor() override {
    if (!object_.has_value()) return;
    recording_->ForgetSaved(*object_, *saved_);
    try {
      if (!recording_->IsRecording()) return;
      const DeviceRecording::Moment begin = recording_->Begin();
      // The recording's weak references make tensors aliased that otherwise would not be.
      SettleLoans();
      saved_.reset();
      recording_->EndRelease(begin, *object_);
    } catch (const std::exception& error) {
      PINION_LOG(kWarning) << "the release of a saved tensor was not recorded: " << error.what();
    }
  }

  at::Tensor Unpack() override {
    if (!recording_->IsRecording()) return saved_->Unpack();
    const DeviceRecording::Moment begin = recording_->BeginRead();
    at::Tensor tensor = saved_->Unpack();
    recording_->EndRead(begin, *object_, tensor, *saved_, part_);
    return tensor;
  }

  // Call before the object is shared.
  void Note(const DeviceRecording::Moment& begin, const at::Tensor& tensor, uint64_t place,
            bool is_leaf) {
    part_ = CurrentPart(tensor.device());
    object_ = recording_->EndSave(begin, tensor, place, is_leaf, *saved_, part_);
  }

  // For a second recording of the same tensor.
  bool IsComputedAgain() const override { return saved_->IsComputedAgain(); }
  bool WasComputedAgain() const override { return saved_->WasComputedAgain(); }
  const void* MemoryOwner() const override { return saved_->MemoryOwner(); }

 private:
  std::unique_ptr<SavedTensor> saved_;
  const std::shared_ptr<DeviceRecording> recording_;
  std::optional<SegmentPart> part_;
  std::optional<DeviceRecording::ObjectId> object_;
};

}  // namespace

std::unique_ptr<SavedTensor> PackRecorded(const std::shared_ptr<DeviceRecording>& recording,
                                          const at::Tensor& tensor, uint64_t place, bool is_leaf,
                                          absl::FunctionRef<std::unique_ptr<SavedTensor>()> pack) {
  if (!recording->IsRecording()) return pack();
  const DeviceRecording::Moment begin = recording->Begin();
  std::unique_ptr<SavedTensor> saved = pack();
  // Only tensors without memory can be placeholders; a dynamic_cast of each would be slow.
  const bool is_placeholder = saved != nullptr && saved->MemoryOwner() == nullptr &&
                              dynamic_cast<const PlaceholderTensor*>(saved.get()) != nullptr;
  if (saved == nullptr || is_placeholder) {
    recording->EndAside(begin);
    return saved;
  }
  auto recorded = std::make_unique<RecordedTensor>(std::move(saved), recording);
  recorded->Note(begin, tensor, place, is_leaf);
  return recorded;
}

void RunBeside(absl::Span<const std::shared_ptr<DeviceRecording>> recordings,
               absl::FunctionRef<void()> work) {
  std::vector<std::pair<DeviceRecording*, DeviceRecording::Moment>> begun;
  // Must not throw, since destructors of scopes call this.
  try {
    for (const auto& recording : recordings) {
      if (recording->IsRecording()) begun.emplace_back(recording.get(), recording->Begin());
    }
  } catch (const std::exception& error) {
    PINION_LOG(kWarning) << "step recording: this step's compute includes offload work: "
                         << error.what();
  }
  work();
  try {
    for (const auto& [recording, begin] : begun) recording->EndAside(begin);
  } catch (const std::exception& error) {
    PINION_LOG(kWarning) << "step recording: this step's compute includes offload work: "
                         << error.what();
  }
}

}  // namespace pinion
