// The registered machine, and each thread's current device and streams on it.
//
// A c10 stream is a number that maps to a machine stream at its first use. Numbers outlive the
// machine: after another RegisterEmuDevice, they name streams of the new one.
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

// Installs `machine`; every thread then has current device 0 and default streams.
void InstallMachine(std::shared_ptr<EmulatedMachine> machine);
std::shared_ptr<EmulatedMachine> InstalledMachine();  // null before the first

// Returns the machine; there must be one.
EmulatedMachine& Machine();

// The functions below throw c10::Error if there is no device of that index.
int DeviceCount() noexcept;  // 0 without a machine
Device& DeviceAt(c10::DeviceIndex index);
std::shared_ptr<Device> SharedDeviceAt(c10::DeviceIndex index);

c10::DeviceIndex CurrentDevice();
c10::DeviceIndex ExchangeDevice(c10::DeviceIndex index);  // returns the previous one; -1: no change
// Returns the index of an "emu" device, or the current index if it has none.
c10::DeviceIndex IndexOf(c10::Device device);

c10::Stream CurrentStream(c10::DeviceIndex index);
c10::Stream ExchangeStream(const c10::Stream& stream);  // returns the previous one
// Returns streams of a small pool, round robin. Does not check the index.
c10::Stream PooledStream(c10::DeviceIndex index);
StreamHandle HandleOf(const c10::Stream& stream);
StreamHandle CurrentHandle(c10::DeviceIndex index);  // HandleOf(CurrentStream(index))

}  // namespace pinion::emu

#endif  // PINION_HOOKS_EMULATED_EMU_STATE_H_
