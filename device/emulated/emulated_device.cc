#include "pinion/device/emulated/emulated_device.h"

#include <utility>

#include "pinion/allocator/base/bytes.h"
#include "pinion/device/emulated/machine_core.h"

namespace pinion {
namespace {

// Keeps the machine alive: pinned memory outlives devices in the hands of allocators.
class EmulatedPinnedSource : public HostMemorySource {
 public:
  EmulatedPinnedSource(std::shared_ptr<MachineCore> core, int device)
      : core_(std::move(core)), device_(device) {}

  std::string name() const override { return "emulated pinned"; }
  uint64_t granularity_bytes() const override { return 4 * kKiB; }
  absl::StatusOr<HostSegment> Allocate(uint64_t size_bytes) override {
    return core_->AllocatePinned(device_, size_bytes);
  }
  absl::Status Free(const HostSegment& segment) override {
    return core_->FreePinned(device_, segment);
  }

 private:
  const std::shared_ptr<MachineCore> core_;
  const int device_;
};

}  // namespace

std::string EmulatedDevice::name() const { return core_->DeviceName(index_); }

DeviceInfo EmulatedDevice::info() const { return core_->Info(index_); }

absl::StatusOr<void*> EmulatedDevice::Allocate(uint64_t size_bytes, StreamHandle stream) {
  return core_->Allocate(index_, size_bytes, stream);
}

absl::Status EmulatedDevice::Free(void* data, StreamHandle stream) {
  return core_->Free(index_, data, stream);
}

std::shared_ptr<HostMemorySource> EmulatedDevice::pinned_source() {
  return std::make_shared<EmulatedPinnedSource>(core_->shared_from_this(), index_);
}

absl::StatusOr<StreamHandle> EmulatedDevice::CreateStream(const std::string& name) {
  return core_->CreateStream(index_, name);
}

absl::Status EmulatedDevice::DestroyStream(StreamHandle stream) {
  return core_->DestroyStream(index_, stream);
}

absl::Status EmulatedDevice::SynchronizeStream(StreamHandle stream) {
  return core_->SynchronizeStream(index_, stream);
}

absl::StatusOr<bool> EmulatedDevice::IsCapturing(StreamHandle stream) {
  return core_->IsCapturing(index_, stream);
}

absl::StatusOr<EventHandle> EmulatedDevice::CreateEvent() {
  return core_->CreateEvent(index_, /*timed=*/false);
}

absl::StatusOr<EventHandle> EmulatedDevice::CreateTimedEvent() {
  return core_->CreateEvent(index_, /*timed=*/true);
}

absl::Status EmulatedDevice::DestroyEvent(EventHandle event) {
  return core_->DestroyEvent(index_, event);
}

absl::Status EmulatedDevice::RecordEvent(EventHandle event, StreamHandle stream) {
  return core_->RecordEvent(index_, event, stream);
}

absl::Status EmulatedDevice::StreamWaitEvent(StreamHandle stream, EventHandle event) {
  return core_->StreamWaitEvent(index_, stream, event);
}

absl::StatusOr<bool> EmulatedDevice::QueryEvent(EventHandle event) {
  return core_->QueryEvent(index_, event);
}

absl::Status EmulatedDevice::WaitEvent(EventHandle event, absl::Duration timeout) {
  return core_->WaitEvent(index_, event, timeout);
}

absl::StatusOr<double> EmulatedDevice::ElapsedMs(EventHandle start, EventHandle end) {
  return core_->ElapsedMs(index_, start, end);
}

absl::Status EmulatedDevice::CopyAsync(CopyDirection direction, absl::Span<const CopyPiece> pieces,
                                       StreamHandle stream) {
  return core_->CopyAsync(index_, direction, pieces, stream);
}

}  // namespace pinion
