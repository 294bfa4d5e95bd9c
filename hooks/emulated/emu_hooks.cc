#include "pinion/hooks/emulated/emu_hooks.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/util/Exception.h>

#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/emulated/emu_generator.h"
#include "pinion/hooks/emulated/emu_memory_ops.h"
#include "pinion/hooks/emulated/emu_state.h"

namespace pinion::emu {

bool EmuHooks::hasPrimaryContext(c10::DeviceIndex index) const {
  return index >= 0 && index < DeviceCount();
}

c10::DeviceIndex EmuHooks::deviceCount() const {
  return static_cast<c10::DeviceIndex>(DeviceCount());
}

void EmuHooks::setCurrentDevice(c10::DeviceIndex index) const { ExchangeDevice(index); }

c10::DeviceIndex EmuHooks::getCurrentDevice() const { return CurrentDevice(); }

c10::DeviceIndex EmuHooks::exchangeDevice(c10::DeviceIndex index) const {
  return ExchangeDevice(index);
}

c10::DeviceIndex EmuHooks::maybeExchangeDevice(c10::DeviceIndex index) const {
  return ExchangeDevice(index);
}

const at::Generator& EmuHooks::getDefaultGenerator(c10::DeviceIndex index) const {
  return DefaultGenerator(index);
}

at::Generator EmuHooks::getNewGenerator(c10::DeviceIndex index) const {
  return NewGenerator(IndexOf(c10::Device(kEmu, index)));
}

at::Device EmuHooks::getDeviceFromPtr(void* data) const {
  int index = 0;
  TORCH_CHECK(Machine().IsDevicePointer(data, &index), data, " is not memory of an emu device");
  return c10::Device(kEmu, static_cast<c10::DeviceIndex>(index));
}

bool EmuHooks::isPinnedPtr(const void* data) const { return Machine().IsPinned(data); }

c10::Allocator* EmuHooks::getPinnedMemoryAllocator() const { return at::getHostAllocator(kEmu); }

void EmuHooks::resizePrivateUse1Bytes(const c10::Storage& storage, size_t size_bytes) const {
  ResizeStorage(storage, size_bytes);
}

}  // namespace pinion::emu
