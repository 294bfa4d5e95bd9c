// The devices of an emulated machine, for the layers above.

#ifndef PINION_DEVICE_EMULATED_EMULATED_BACKEND_H_
#define PINION_DEVICE_EMULATED_EMULATED_BACKEND_H_

#include <memory>

#include "pinion/device/device_backend.h"
#include "pinion/device/emulated/emulated_machine.h"

namespace pinion {

// type_name "emu". The backend keeps the machine alive.
DeviceBackend EmulatedBackend(std::shared_ptr<EmulatedMachine> machine);

}  // namespace pinion

#endif  // PINION_DEVICE_EMULATED_EMULATED_BACKEND_H_
