// The Device and the pinned memory source that an emulated machine hands out: names for it.
//
// Nothing outside this directory includes this file.

#ifndef PINION_DEVICE_EMULATED_EMULATED_DEVICE_H_
#define PINION_DEVICE_EMULATED_EMULATED_DEVICE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/device/device.h"

namespace pinion {

class MachineCore;

// Owned by its machine.
class EmulatedDevice : public Device {
 public:
  EmulatedDevice(MachineCore* core, int index) : core_(core), index_(index) {}

  std::string name() const override;
  int index() const override { return index_; }
  DeviceInfo info() const override;
  absl::StatusOr<void*> Allocate(uint64_t size_bytes, StreamHandle stream) override;
  absl::Status Free(void* data, StreamHandle stream) override;
  std::shared_ptr<HostMemorySource> pinned_source() override;
  absl::StatusOr<StreamHandle> CreateStream(const std::string& name) override;
  absl::Status DestroyStream(StreamHandle stream) override;
  absl::Status SynchronizeStream(StreamHandle stream) override;
  absl::StatusOr<bool> IsCapturing(StreamHandle stream) override;
  absl::StatusOr<EventHandle> CreateEvent() override;
  absl::StatusOr<EventHandle> CreateTimedEvent() override;
  absl::Status DestroyEvent(EventHandle event) override;
  absl::Status RecordEvent(EventHandle event, StreamHandle stream) override;
  absl::Status StreamWaitEvent(StreamHandle stream, EventHandle event) override;
  absl::StatusOr<bool> QueryEvent(EventHandle event) override;
  absl::Status WaitEvent(EventHandle event, absl::Duration timeout) override;
  absl::StatusOr<double> ElapsedMs(EventHandle start, EventHandle end) override;
  absl::Status CopyAsync(CopyDirection direction, absl::Span<const CopyPiece> pieces,
                         StreamHandle stream) override;

 private:
  MachineCore* const core_;
  const int index_;
};

}  // namespace pinion

#endif  // PINION_DEVICE_EMULATED_EMULATED_DEVICE_H_
