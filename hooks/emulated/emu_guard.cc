#include "pinion/hooks/emulated/emu_guard.h"

#include <c10/util/Exception.h>

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "pinion/allocator/base/check.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/emulated/emu_allocator.h"
#include "pinion/hooks/emulated/emu_state.h"

namespace pinion::emu {
namespace {

// The event behind c10's void*, which is null before the first record and after a move.
struct Event {
  std::shared_ptr<Device> device;  // keeps its machine alive
  EventHandle handle;
};

Event* MakeEvent(c10::DeviceIndex index) {
  auto event = std::make_unique<Event>();
  event->device = SharedDeviceAt(index);
  const absl::StatusOr<EventHandle> handle = event->device->CreateEvent();
  ThrowIfError(handle.status(), "creating an event");
  event->handle = *handle;
  return event.release();
}

void Destroy(const Event& event) noexcept {
  const absl::Status status = event.device->DestroyEvent(event.handle);
  if (!status.ok()) PINION_LOG(kError) << "destroying an event: " << status.ToString();
}

}  // namespace

c10::DeviceType EmuGuard::type() const { return kEmu; }

c10::DeviceIndex EmuGuard::deviceCount() const noexcept {
  return static_cast<c10::DeviceIndex>(DeviceCount());
}

c10::Device EmuGuard::exchangeDevice(c10::Device device) const {
  return c10::Device(kEmu, ExchangeDevice(device.index()));
}

c10::Device EmuGuard::getDevice() const { return c10::Device(kEmu, CurrentDevice()); }

void EmuGuard::setDevice(c10::Device device) const { ExchangeDevice(device.index()); }

void EmuGuard::uncheckedSetDevice(c10::Device device) const noexcept {
  if (device.index() < DeviceCount()) ExchangeDevice(device.index());
}

c10::Stream EmuGuard::getStream(c10::Device device) const { return CurrentStream(IndexOf(device)); }

c10::Stream EmuGuard::getDefaultStream(c10::Device device) const {
  return c10::Stream(c10::Stream::DEFAULT, c10::Device(kEmu, IndexOf(device)));
}

c10::Stream EmuGuard::getStreamFromGlobalPool(c10::Device device, bool /*high_priority*/) const {
  return PooledStream(IndexOf(device));
}

c10::Stream EmuGuard::getNewStream(c10::Device device, int /*priority*/) const {
  return PooledStream(IndexOf(device));
}

c10::Stream EmuGuard::exchangeStream(c10::Stream stream) const { return ExchangeStream(stream); }

void* EmuGuard::getStreamNativeHandle(c10::Stream stream) const {
  return HandleOf(stream).native();
}

bool EmuGuard::queryStream(const c10::Stream& stream) const {
  const std::unique_ptr<Event> event(MakeEvent(stream.device_index()));
  const absl::Status recorded = event->device->RecordEvent(event->handle, HandleOf(stream));
  const absl::StatusOr<bool> done = event->device->QueryEvent(event->handle);
  Destroy(*event);
  ThrowIfError(recorded, "querying a stream");
  ThrowIfError(done.status(), "querying a stream");
  return *done;
}

void EmuGuard::synchronizeStream(const c10::Stream& stream) const {
  ThrowIfError(DeviceAt(stream.device_index()).SynchronizeStream(HandleOf(stream)),
               "synchronizing a stream");
}

void EmuGuard::synchronizeDevice(c10::DeviceIndex index) const {
  ThrowIfError(Machine().SynchronizeDevice(index), "synchronizing a device");
}

void EmuGuard::recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const {
  EmuAllocator::Get().recordStream(data, stream);
}

void EmuGuard::record(void** event, const c10::Stream& stream, c10::DeviceIndex /*index*/,
                      c10::EventFlag /*flag*/) const {
  if (*event == nullptr) *event = MakeEvent(stream.device_index());
  const Event& recorded = *static_cast<Event*>(*event);
  ThrowIfError(recorded.device->RecordEvent(recorded.handle, HandleOf(stream)),
               "recording an event");
}

void EmuGuard::block(void* event, const c10::Stream& stream) const {
  ThrowIfError(DeviceAt(stream.device_index())
                   .StreamWaitEvent(HandleOf(stream), static_cast<Event*>(event)->handle),
               "waiting for an event");
}

bool EmuGuard::queryEvent(void* event) const {
  const Event& queried = *static_cast<Event*>(event);
  const absl::StatusOr<bool> done = queried.device->QueryEvent(queried.handle);
  ThrowIfError(done.status(), "querying an event");
  return *done;
}

void EmuGuard::synchronizeEvent(void* event) const {
  const Event& awaited = *static_cast<Event*>(event);
  ThrowIfError(awaited.device->WaitEvent(awaited.handle, absl::InfiniteDuration()),
               "synchronizing an event");
}

void EmuGuard::destroyEvent(void* event, c10::DeviceIndex /*index*/) const noexcept {
  const std::unique_ptr<Event> destroyed(static_cast<Event*>(event));
  Destroy(*destroyed);
}

double EmuGuard::elapsedTime(void* /*start*/, void* /*end*/, c10::DeviceIndex /*index*/) const {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "events of emu carry no time: read EmulatedMachine::now_ms() or time_stats()");
}

}  // namespace pinion::emu
