// A Device that forwards to another one, counts the calls, and can make them fail.
//
//   auto device = std::make_shared<ForwardingDevice>(machine->device(0));
//   device->FailCalls([](const std::string& call, uint64_t) {
//     return call == "RecordEvent" ? absl::UnavailableError("injected") : absl::OkStatus();
//   });
//
// Thread safety: thread-safe. Exception: no call may be under way during FailCalls.

#ifndef PINION_TESTS_SUPPORT_FORWARDING_DEVICE_H_
#define PINION_TESTS_SUPPORT_FORWARDING_DEVICE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/device/device.h"

namespace pinion::testing {

class ForwardingDevice : public Device {
 public:
  explicit ForwardingDevice(std::shared_ptr<Device> device) : device_(std::move(device)) {}

  // `fail` gets the function's name (e.g. "CopyAsync") and the number of calls so far, including
  // this one. If it returns an error, the call does not reach the device.
  void FailCalls(std::function<absl::Status(const std::string& call, uint64_t number)> fail) {
    fail_ = std::move(fail);
  }
  uint64_t calls() const { return calls_.load(); }
  // Created and not destroyed.
  int live_streams() const { return live_streams_.load(); }
  int live_events() const { return live_events_.load(); }

  std::string name() const override { return device_->name(); }
  DeviceInfo info() const override { return device_->info(); }
  std::shared_ptr<HostMemorySource> pinned_source() override { return device_->pinned_source(); }

  absl::StatusOr<void*> Allocate(uint64_t size_bytes, StreamHandle stream) override {
    PINION_RETURN_IF_ERROR(Count("Allocate"));
    return device_->Allocate(size_bytes, stream);
  }
  absl::Status Free(void* data, StreamHandle stream) override {
    PINION_RETURN_IF_ERROR(Count("Free"));
    return device_->Free(data, stream);
  }
  absl::StatusOr<StreamHandle> CreateStream(const std::string& name) override {
    PINION_RETURN_IF_ERROR(Count("CreateStream"));
    return Made(device_->CreateStream(name), live_streams_);
  }
  absl::Status DestroyStream(StreamHandle stream) override {
    PINION_RETURN_IF_ERROR(Count("DestroyStream"));
    return Destroyed(device_->DestroyStream(stream), live_streams_);
  }
  absl::Status SynchronizeStream(StreamHandle stream) override {
    PINION_RETURN_IF_ERROR(Count("SynchronizeStream"));
    return device_->SynchronizeStream(stream);
  }
  absl::StatusOr<bool> IsCapturing(StreamHandle stream) override {
    PINION_RETURN_IF_ERROR(Count("IsCapturing"));
    return device_->IsCapturing(stream);
  }
  absl::StatusOr<EventHandle> CreateEvent() override {
    PINION_RETURN_IF_ERROR(Count("CreateEvent"));
    return Made(device_->CreateEvent(), live_events_);
  }
  absl::StatusOr<EventHandle> CreateTimedEvent() override {
    PINION_RETURN_IF_ERROR(Count("CreateTimedEvent"));
    return Made(device_->CreateTimedEvent(), live_events_);
  }
  absl::Status DestroyEvent(EventHandle event) override {
    PINION_RETURN_IF_ERROR(Count("DestroyEvent"));
    return Destroyed(device_->DestroyEvent(event), live_events_);
  }
  absl::Status RecordEvent(EventHandle event, StreamHandle stream) override {
    PINION_RETURN_IF_ERROR(Count("RecordEvent"));
    return device_->RecordEvent(event, stream);
  }
  absl::Status StreamWaitEvent(StreamHandle stream, EventHandle event) override {
    PINION_RETURN_IF_ERROR(Count("StreamWaitEvent"));
    return device_->StreamWaitEvent(stream, event);
  }
  absl::StatusOr<bool> QueryEvent(EventHandle event) override {
    PINION_RETURN_IF_ERROR(Count("QueryEvent"));
    return device_->QueryEvent(event);
  }
  absl::Status WaitEvent(EventHandle event, absl::Duration timeout) override {
    PINION_RETURN_IF_ERROR(Count("WaitEvent"));
    return device_->WaitEvent(event, timeout);
  }
  absl::StatusOr<double> ElapsedMs(EventHandle start, EventHandle end) override {
    PINION_RETURN_IF_ERROR(Count("ElapsedMs"));
    return device_->ElapsedMs(start, end);
  }
  absl::Status CopyAsync(CopyDirection direction, absl::Span<const CopyPiece> pieces,
                         StreamHandle stream) override {
    PINION_RETURN_IF_ERROR(Count("CopyAsync"));
    return device_->CopyAsync(direction, pieces, stream);
  }

 private:
  absl::Status Count(const char* call) {
    const uint64_t number = calls_.fetch_add(1) + 1;
    return fail_ ? fail_(call, number) : absl::OkStatus();
  }

  template <typename Handle>
  static absl::StatusOr<Handle> Made(absl::StatusOr<Handle> handle, std::atomic<int>& live) {
    if (handle.ok()) live.fetch_add(1);
    return handle;
  }
  static absl::Status Destroyed(absl::Status status, std::atomic<int>& live) {
    if (status.ok()) live.fetch_sub(1);
    return status;
  }

  const std::shared_ptr<Device> device_;
  std::function<absl::Status(const std::string&, uint64_t)> fail_;
  std::atomic<uint64_t> calls_{0};
  std::atomic<int> live_streams_{0};
  std::atomic<int> live_events_{0};
};

}  // namespace pinion::testing

#endif  // PINION_TESTS_SUPPORT_FORWARDING_DEVICE_H_
