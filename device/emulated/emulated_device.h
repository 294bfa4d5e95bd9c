// Creates the Device objects of an emulated machine. Private to this directory.

#ifndef PINION_DEVICE_EMULATED_EMULATED_DEVICE_H_
#define PINION_DEVICE_EMULATED_EMULATED_DEVICE_H_

#include <memory>

#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/device/emulated/machine_core.h"

namespace pinion {

// `machine` owns the device and `core`.
std::unique_ptr<Device> NewEmulatedDevice(EmulatedMachine* machine, MachineCore* core, int index);

}  // namespace pinion

#endif  // PINION_DEVICE_EMULATED_EMULATED_DEVICE_H_
