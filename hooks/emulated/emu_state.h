// The registered machine, and each thread's current device and streams on it.
//
// A c10 stream is a number; it is mapped to a stream of the machine when it is first used, so that
// numbers outlive the machine: after another RegisterEmuDevice they name streams of the new one.
//
// Thread safety: thread-safe, except InstallMachine.

#ifndef PINION_HOOKS_EMULATED_EMU_STATE_H_
#define PINION_HOOKS_EMULATED_EMU_STATE_H_

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/Stream.h>

#include <memory>

#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"

namespace pinion::emu {

inline constexpr c10::DeviceType kEmu = c10::DeviceType::PrivateUse1;
inline constexpr int kMaxDevices = 64;

// Every thread's current device becomes 0 and its current streams the default ones.
void InstallMachine(std::shared_ptr<EmulatedMachine> machine);
std::shared_ptr<EmulatedMachine> InstalledMachine();  // null before the first

// Not before there is one.
EmulatedMachine& Machine();

// The functions below throw c10::Error when there is no device of that index.
int DeviceCount() noexcept;  // 0 without a machine
Device& DeviceAt(c10::DeviceIndex index);
std::shared_ptr<Device> SharedDeviceAt(c10::DeviceIndex index);

c10::DeviceIndex CurrentDevice();
c10::DeviceIndex ExchangeDevice(c10::DeviceIndex index);  // returns the one before; -1: no change
// The index of an "emu" device; the current device's where it has none.
c10::DeviceIndex IndexOf(c10::Device device);

c10::Stream CurrentStream(c10::DeviceIndex index);
c10::Stream ExchangeStream(const c10::Stream& stream);  // returns the one before
// Round robin over a small pool. Does not look whether there is such a device.
c10::Stream PooledStream(c10::DeviceIndex index);
StreamHandle HandleOf(const c10::Stream& stream);
StreamHandle CurrentHandle(c10::DeviceIndex index);  // HandleOf(CurrentStream(index))

}  // namespace pinion::emu

#endif  // PINION_HOOKS_EMULATED_EMU_STATE_H_
