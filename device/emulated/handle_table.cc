#include "pinion/device/emulated/handle_table.h"

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "pinion/device/emulated/faults.h"

namespace pinion {
namespace {

void* NewHandle() {
  static std::atomic<uintptr_t> last = 0x1000;
  return reinterpret_cast<void*>(last += 16);
}

}  // namespace

StreamHandle HandleTable::Add(Stream stream) {
  void* const native = NewHandle();
  streams_[native] = std::move(stream);
  return StreamHandle(native);
}

HandleTable::Stream* HandleTable::FindOnAnyDevice(StreamHandle stream) {
  const auto it = streams_.find(stream.native());
  return it == streams_.end() ? nullptr : &it->second;
}

absl::StatusOr<HandleTable::Stream*> HandleTable::Find(int device, StreamHandle stream) {
  Stream* const found = FindOnAnyDevice(stream);
  if (found == nullptr) {
    return absl::InvalidArgumentError(EmulatedDeviceName(device) + ": no such stream" +
                                      (stream.valid() ? " (destroyed?)" : ": the handle is empty") +
                                      "; pass one that CreateStream returned");
  }
  if (found->device != device) {
    return absl::InvalidArgumentError("stream " + found->name + " was used with device " +
                                      EmulatedDeviceName(device) + ": use it with " +
                                      EmulatedDeviceName(found->device));
  }
  return found;
}

EventHandle HandleTable::Add(Event event) {
  void* const native = NewHandle();
  events_[native] = std::move(event);
  return EventHandle(native);
}

absl::StatusOr<HandleTable::Event*> HandleTable::Find(EventHandle event) {
  const auto it = events_.find(event.native());
  if (it != events_.end()) return &it->second;
  return absl::InvalidArgumentError(
      std::string(event.valid() ? "no such event (destroyed?)" : "the event handle is empty") +
      "; pass one that CreateEvent returned");
}

}  // namespace pinion
