#include "pinion/bench/null_device.h"

#include <new>

namespace pinion {
namespace {

constexpr std::align_val_t kPage{4096};

struct NullEvent {
  bool pending = false;
};

NullEvent& Get(EventHandle event) { return *static_cast<NullEvent*>(event.native()); }

class NullPinnedSource final : public HostMemorySource {
 public:
  std::string name() const override { return "null pinned"; }
  bool pinned() const override { return true; }
  uint64_t granularity_bytes() const override { return static_cast<uint64_t>(kPage); }
  absl::StatusOr<HostSegment> Allocate(uint64_t size_bytes) override {
    return HostSegment{.data = operator new(size_bytes, kPage), .size_bytes = size_bytes};
  }
  absl::Status Free(const HostSegment& segment) override {
    operator delete(segment.data, kPage);
    return absl::OkStatus();
  }
};

}  // namespace

absl::StatusOr<void*> NullDevice::Allocate(uint64_t size_bytes, StreamHandle stream) {
  return operator new(size_bytes, kPage);
}

absl::Status NullDevice::Free(void* data, StreamHandle stream) {
  operator delete(data, kPage);
  return absl::OkStatus();
}

std::shared_ptr<HostMemorySource> NullDevice::pinned_source() {
  return std::make_shared<NullPinnedSource>();
}

absl::StatusOr<StreamHandle> NullDevice::CreateStream(const std::string& name) {
  return StreamHandle(reinterpret_cast<void*>(++streams_));
}

absl::StatusOr<EventHandle> NullDevice::CreateEvent() { return EventHandle(new NullEvent); }

absl::Status NullDevice::DestroyEvent(EventHandle event) {
  delete &Get(event);
  return absl::OkStatus();
}

absl::Status NullDevice::RecordEvent(EventHandle event, StreamHandle stream) {
  Get(event).pending = events_ == Events::kPending;
  return absl::OkStatus();
}

absl::StatusOr<bool> NullDevice::QueryEvent(EventHandle event) {
  const bool done = !Get(event).pending;
  Get(event).pending = false;
  return done;
}

absl::Status NullDevice::WaitEvent(EventHandle event, absl::Duration timeout) {
  Get(event).pending = false;
  return absl::OkStatus();
}

absl::StatusOr<bool> CountingNullDevice::IsCapturing(StreamHandle stream) {
  ++capture_queries_;
  return NullDevice::IsCapturing(stream);
}

absl::StatusOr<EventHandle> CountingNullDevice::CreateEvent() {
  ++events_;
  return NullDevice::CreateEvent();
}

absl::Status CountingNullDevice::DestroyEvent(EventHandle event) {
  ++events_;
  return NullDevice::DestroyEvent(event);
}

absl::Status CountingNullDevice::RecordEvent(EventHandle event, StreamHandle stream) {
  ++events_;
  return NullDevice::RecordEvent(event, stream);
}

absl::Status CountingNullDevice::StreamWaitEvent(StreamHandle stream, EventHandle event) {
  ++events_;
  return NullDevice::StreamWaitEvent(stream, event);
}

absl::StatusOr<bool> CountingNullDevice::QueryEvent(EventHandle event) {
  ++events_;
  return NullDevice::QueryEvent(event);
}

absl::Status CountingNullDevice::WaitEvent(EventHandle event, absl::Duration timeout) {
  ++events_;
  return NullDevice::WaitEvent(event, timeout);
}

absl::Status CountingNullDevice::CopyAsync(CopyDirection direction,
                                           absl::Span<const CopyPiece> pieces,
                                           StreamHandle stream) {
  ++copies_;
  return NullDevice::CopyAsync(direction, pieces, stream);
}

}  // namespace pinion
